"""The timeline of a run's typical step as a figure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.cli import main
from tests.report.events import SLOW, lines, write_run


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Three steps, of which the second is the typical one."""
    steps = [
        {**event.to_dict(), "step": step, "start": event.start * long, "end": event.end * long}
        for step, long in ((3, 0.1), (4, 0.2), (5, 0.9))
        for event in SLOW
    ]
    write_run(tmp_path / "run")
    (tmp_path / "run" / "events.jsonl").write_text(lines(steps))
    return tmp_path / "run"


def test_a_figure_is_of_the_typical_step(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the plot extra")
    assert main(["report", str(recorded), "--format", "svg"]) == 0
    assert capsys.readouterr().out == f"{recorded / 'timeline.svg'}\n"
    shown = re.findall(r"<!-- (.*?) -->", (recorded / "timeline.svg").read_text())
    assert {"rank 0: compute", "rank 1: reduce gradients", "milliseconds of step 5"} <= set(shown)
    assert main(["report", str(recorded), "--format", "png", "--out", str(recorded / "mine.png")]) == 0
    assert (recorded / "mine.png").read_bytes().startswith(b"\x89PNG")
    assert not (recorded / "report.html").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["{run}", "--format", "svg"], "two were named"),
        (["--format", "svg", "--out", "{run}/a.png"], "does not end in .svg"),
        (["--format", "gif"], "gif"),
    ],
)
def test_what_is_no_figure_is_refused(
    recorded: Path, more: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(recorded), *(word.format(run=recorded) for word in more)]) == 2
    assert told in capsys.readouterr().err


def test_a_run_without_events_names_the_setting(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recorded / "events.jsonl").write_text("")
    assert main(["report", str(recorded), "--format", "svg"]) == 2
    assert "log.events-every" in capsys.readouterr().err
