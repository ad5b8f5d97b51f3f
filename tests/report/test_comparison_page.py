"""Two runs side by side, as a browser shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import main
from paceline.command_line import quantities as said
from paceline.report.run import read_run
from tests.report.browser import Browser
from tests.report.events import SLOW, figures, write_run


def test_two_runs_side_by_side(run: Path, page: Browser, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", SLOW, [figures(step, float(step)) for step in (1, 4, 8)], "steps: 8\n")
    assert main(["report", str(run), str(other), "--out", str(tmp_path / "both.html")]) == 0
    page.open(tmp_path / "both.html", 400)
    assert page.run("document.documentElement.scrollWidth") <= 400
    rate = read_run(run).history.mean("perf/tokens_per_second")
    assert rate is not None
    cells = page.run(
        "[...document.querySelectorAll('#figures tr')].map((row) => [...row.children].map((c) => c.textContent))"
    )
    shown = {row[0]: row[1:] for row in cells}
    assert shown["Tokens/s, all ranks"][1] == "100"
    assert float(shown["Tokens/s, all ranks"][2]) == pytest.approx(100 / rate, rel=0.01)
    assert shown["The typical step"][1] == "7.50 s"
    times = max(rate / 100, 100 / rate)
    assert f"does {said.digits(times)} times as many tokens/s" in page.text("#figures .sentence")
    assert "at step 8, the last that both tell of" in page.text("#figures .sentence")
    script = (
        "[...document.querySelectorAll('#settings tbody tr')].map((r) => [0, 2].map((i) => r.cells[i].textContent))"
    )
    settings = dict(page.run(script))
    assert settings["steps"] == "8" and settings["strategy.zero"] == "0" and "seed" not in settings
    lines = page.run("charts.data.charts[0].lines")
    assert [line["name"] for line in lines] == ["run", "other"]
    steps = page.run("charts.data.charts[0].steps")
    assert {step: v for step, v in zip(steps, lines[1]["values"], strict=True) if v} == {1: 2, 4: 2, 8: 2}


def test_runs_of_one_name_are_told_apart_by_where_they_lie(tmp_path: Path, page: Browser) -> None:
    for place in ("one", "other"):
        write_run(tmp_path / place / "run", SLOW, [figures(1, 1.0), figures(2, 2.0, train__loss=None)])
    assert main(["report", str(tmp_path / "one" / "run"), str(tmp_path / "other" / "run")]) == 0
    page.open(tmp_path / "one" / "run" / "beside-run.html")
    assert page.text("h1") == "one/run and other/run"
    assert "one/run and other/run do as many tokens/s; at step 1," in page.text("#figures .sentence")


def test_a_run_beside_one_without_anything(page: Browser, tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", SLOW, [figures(1, 1.0)])
    write_run(tmp_path / "second")
    assert main(["report", str(first), str(tmp_path / "second")]) == 0
    page.open(first / "beside-second.html")
    assert "not known" in page.text("#figures .sentence")
    assert main(["report", str(first), str(first)]) == 0
