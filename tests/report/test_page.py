"""The page of a run, as a browser shows it: its numbers, what hand and keyboard do, and who is named."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.command_line import quantities as said
from paceline.core.events import Event
from paceline.core.memory import memory as planned_memory
from paceline.report.page import page as page_of
from paceline.report.run import read_run
from tests.quick import diagonal
from tests.report.browser import Browser
from tests.report.events import SLOW, figures, write_run
from tests.train.processes import metrics

WIDTHS = (1280, 400)


def value(page: Browser, name: str) -> float:
    return float(page.run("document.querySelector(`[data-figure=${arguments[0]}]`).dataset.value", name))


# ---- numbers


def test_the_numbers_are_those_of_the_runs_files(run: Path, shown: Browser) -> None:
    rows = [row for row in metrics(run) if "train/loss" in row and row["step"] > 1]
    seconds = [row["perf/step_seconds"] * steps for row, steps in zip(rows, (3, 4, 4, 4), strict=True)]
    weighed = {
        name: sum(row[key] * time for row, time in zip(rows, seconds, strict=True)) / sum(seconds)
        for name, key in (("tokens_per_second", "perf/tokens_per_second"), ("exposed", "comm/exposed_fraction"))
    }
    for name, expected in weighed.items():
        assert value(shown, name) == pytest.approx(expected)
    assert value(shown, "steps") == 16
    assert value(shown, "loss") == rows[-1]["train/loss"]
    ended = json.loads((run / "plan.json").read_text())["peak_bytes"]["measured"]
    held = [json.loads(line)["memory"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert value(shown, "peak_bytes") == max(rows[-1]["memory/peak_bytes"], ended, *held)


def test_the_timeline_has_every_event_of_every_step(run: Path, shown: Browser) -> None:
    events = [Event.from_dict(json.loads(line)) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = shown.run("timeline.data.steps")
    assert [step["number"] for step in steps] == sorted({event.step + 1 for event in events})
    for step in steps:
        mine = [event for event in events if event.step == step["number"] - 1]
        assert len(step["start"]) == len(mine)
        assert sum(step["took"]) == pytest.approx(sum(event.seconds for event in mine) * 1e6, rel=0.01, abs=10)
        assert sum(step["exposed"]) == pytest.approx(sum(event.exposed for event in mine) * 1e6, rel=0.01, abs=10)
        assert sum(step["sent"]) == sum(event.sent for event in mine)
    measured = [lane for lane in shown.run("timeline.state.step.lanes") if len(lane) == 2]
    assert len(measured) == len({(event.rank, event.stream) for event in events})
    lengths = [max(e.end for e in mine) - min(e.start for e in mine) for mine in _computed_by_step(events)]
    typical = steps[shown.run("timeline.data.typical")]["seconds"]
    assert typical == pytest.approx(sorted(lengths)[(len(lengths) - 1) // 2])


def _computed_by_step(events: list[Event]) -> list[list[Event]]:
    return [
        [event for event in events if event.step == step and event.stream == "compute"]
        for step in sorted({event.step for event in events})
    ]


def test_the_slow_rank_is_named_with_what_it_costs_and_why(run: Path, shown: Browser) -> None:
    assert value(shown, "slowest_rank") == 1
    assert shown.text("#summary .sentence").startswith("Rank 1 binds this run")
    assert "takes longer computing" in shown.text("#ranks .sentence")
    found = read_run(run)
    # Two blocks sleep for 50 ms each; the other rank stands still for most of that.
    cost = statistics.median(step.ranks[1].cost for step in found.steps)
    assert cost > 0.05


def test_the_plan_of_memory_is_the_schedules(run: Path, shown: Browser) -> None:
    program = read_run(run).program
    assert program is not None
    plan = planned_memory(program.schedule, program.micro_batches)
    script = (
        "[...document.querySelectorAll('#memory .wide tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    rows = {row[0]: row[2:] for row in shown.run(script)}
    assert list(rows) == ["zero 0", "zero 1", "zero 2 (this run)", "zero 3"]
    assert rows["zero 2 (this run)"] == [
        said.size(getattr(plan, name))
        for name in ("parameters", "gradients", "optimizer", "buckets", "gathered", "total")
    ]
    assert f"plans {said.size(plan.total)}" in shown.text("#memory .sentence")
    assert value(shown, "planned_bytes") == plan.total


def test_memory_over_the_step_is_what_events_tell(run: Path, shown: Browser) -> None:
    step = read_run(run).typical
    assert step is not None
    chart = shown.run("charts.memory.charts[0]")
    most = max((event for event in step.events), key=lambda event: event.memory)
    ran = sorted((e for e in step.events if e.rank == most.rank and e.memory), key=lambda event: event.start)
    assert chart["lines"][0]["values"] == pytest.approx([event.memory / 2**20 for event in ran], abs=1e-3)
    assert chart["steps"] == pytest.approx([1e3 * (event.start - step.origin) for event in ran], abs=1e-3)
    assert f"rank {most.rank} held" in shown.text("#memory .sentence")


def test_when_most_memory_was_held_is_said(page: Browser, tmp_path: Path) -> None:
    # A line of figures before the step knows of less.
    held = {"forward": 1 << 20, "backward": 3 << 20, "update": 2 << 20}
    events = [replace(event, memory=held.get(event.kind, 0) * (1 + event.rank)) for event in SLOW]
    folder = write_run(tmp_path / "run", events, [figures(1, 1.0, memory__peak_bytes=5 << 20)])
    assert main(["report", str(folder)]) == 0
    page.open(folder / "report.html")
    assert "At most a rank held 6.00 MiB;" in page.text("#memory .sentence")
    told = "rank 1 held between 2.00 MiB, at the start of forward of a, and 6.00 MiB, at the start of backward of a"
    assert told in page.text("#memory .sentence")
    assert page.run("charts.memory.charts[0].lines[0].values") == [2, 6, 4]


def test_the_verdict_names_the_setting_that_would_help_most(run: Path, shown: Browser) -> None:
    found = read_run(run)
    assert found.what_if is not None
    now = found.what_if.predict(found.what_if.own).seconds
    gain = max(
        1 - each.step.seconds / now for each in found.single_changes if each.setting.devices == 2 and each.times == 1
    )
    said_of_it = re.search(
        r"\(--strategy\.(zero \d|bucket-mb [\d.]+)\) is expected to help most", shown.text("#summary .sentence")
    )
    assert bool(said_of_it) == (gain >= 0.01)
    assert said_of_it is not None or "No other stage or bucket size" in shown.text("#summary .sentence")


def test_charts_show_the_figures_that_were_logged(run: Path, shown: Browser) -> None:
    charts = {chart["title"]: chart for chart in shown.run("charts.data.charts")}
    rows = [row for row in metrics(run) if "train/loss" in row]
    loss = charts["Loss, nats per token"]
    assert loss["steps"] == [row["step"] for row in rows]
    assert loss["lines"][0]["values"] == pytest.approx([row["train/loss"] for row in rows], rel=1e-5)
    # The end's checkpoint has a line after the last validation's.
    validated = [row["val/loss"] for row in metrics(run) if "val/loss" in row]
    assert [v for v in loss["lines"][1]["values"] if v is not None] == pytest.approx(validated, rel=1e-5)
    assert (
        shown.run("charts.plots().length")
        == len(charts) + 1
        == len(shown.run("[...document.querySelectorAll('.u-over')]"))
    )
    assert shown.run("charts.data.marks.checkpoint") == [16]
    steps = shown.run("charts.plots()[1].axes[0]._values")
    assert steps and all("." not in step for step in steps), "steps are whole numbers"


# ---- layout


@pytest.mark.parametrize(("dark", "width"), diagonal([False, True], WIDTHS))
def test_nothing_sticks_out_of_the_window(run: Path, page: Browser, width: int, dark: bool) -> None:
    page.open(run / "report.html", width, dark=dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("[...document.querySelectorAll('canvas')].every((c) => c.clientWidth > 100 && c.clientHeight > 60)")
    # No word of a label is broken, which has room for a line.
    assert page.run("[...document.querySelectorAll('.controls label')].every((label) => label.clientHeight < 60)")
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") != dark


def test_everything_has_a_name_for_who_cannot_see_it(shown: Browser) -> None:
    assert shown.run("document.documentElement.lang") == "en"
    unnamed = """[...document.querySelectorAll('canvas#lanes, svg, .chart, [role=region], nav, section')].filter(
      (element) => !element.getAttribute('aria-label') && !element.getAttribute('aria-labelledby')).length"""
    assert shown.run(unnamed) == 0
    assert (
        shown.run(
            "document.querySelectorAll('th:not([scope])').length - document.querySelectorAll('.u-legend th').length"
        )
        == 0
    )


def test_on_paper_there_is_no_button_and_no_dark(run: Path, page: Browser) -> None:
    page.open(run / "report.html", dark=True)
    page.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page.settle()
    assert page.run("getComputedStyle(document.querySelector('.controls')).display") == "none"
    assert page.run("drawing.colour('page')") == "#ffffff"
    # Printers leave backgrounds out, which colours in keys are.
    assert page.run("getComputedStyle(document.querySelector('.key')).printColorAdjust") == "exact"


# ---- what no run should hold


HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "\u2028\u2029<!--",
    "'\"><svg onload=window.hacked=1>\u202e",
    "]]>&lt;{{1}}${1}\x00\x1b[31m\ud800",
]


def test_names_that_are_markup_stay_text(page: Browser, tmp_path: Path) -> None:
    events = [replace(event, target=HOSTILE[i % len(HOSTILE)], kind=event.kind) for i, event in enumerate(SLOW)]
    folder = write_run(tmp_path / "<b onclick=hacked=1>run", events, [figures(1, 1.0)])
    facts = {"ranks": 2, "host": HOSTILE[0], "processor": HOSTILE[3], "versions": {"torch": HOSTILE[1]}}
    (folder / "environment.json").write_text(json.dumps(facts))
    (folder / "config.yaml").write_text(f"model: {{preset: {json.dumps(HOSTILE[1])}}}\n")
    assert main(["report", str(folder), "--out", str(tmp_path / "report.html")]) == 0
    page.open(tmp_path / "report.html")
    page.press("n")
    assert HOSTILE[0] in page.text("#details") + page.run("timeline.describe(0)")
    assert page.text("h1") == "<b onclick=hacked=1>run"
    assert page.run("window.hacked === undefined")
    assert page.run("document.querySelectorAll('img, b').length") == 0
    assert "\u202e" not in page.text("#communication") and "At step 1, the only one" in page.text("#curves .sentence")


def test_only_the_pages_own_scripts_may_run(run: Path, browser: Browser, tmp_path: Path) -> None:
    text = (run / "report.html").read_text()
    changed = text.replace("</main>", "<script>window.hacked = 1</script></main>")
    assert changed != text
    (tmp_path / "changed.html").write_text(changed)
    browser.open(tmp_path / "changed.html")
    assert browser.run("window.hacked === undefined")
    assert "Content Security Policy" in "".join(browser.complaints())


@pytest.mark.parametrize("kind", ["empty", "no metrics", "no events", "one rank"])
def test_what_a_run_lacks_is_said(page: Browser, tmp_path: Path, kind: str) -> None:
    events = {"no metrics": SLOW, "one rank": SLOW[:4]}.get(kind, [])
    rows = [figures(step, float(step)) for step in (1, 2)] if kind in ("no events", "one rank") else []
    folder = write_run(tmp_path / "run", events, rows)
    assert main(["report", str(folder)]) == 0
    page.open(folder / "report.html")
    assert page.run("document.querySelectorAll('section').length") == 8
    assert page.run("document.querySelectorAll('.problems li').length") >= 1


def test_a_page_is_one_small_file_that_fetches_nothing(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert len(text.encode()) < 2_000_000
    assert not re.search(
        r"""(?:src|href)=["'](?!#)|@import|url\(""", re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    )


# ---- size


@pytest.mark.full
def test_a_step_of_100_000_ops_is_drawn_quickly(page: Browser, tmp_path: Path) -> None:
    count = 12_500
    events = [
        replace(event, target=f"blocks.{i}", micro_batch=i, start=i + event.start / 10, end=i + event.end / 10)
        for rank in (0, 1)
        for i in range(count)
        for event in SLOW
        if event.rank == rank
    ]
    assert len(events) == 100_000
    (tmp_path / "large.html").write_text(page_of(read_run(write_run(tmp_path / "run", events, [figures(1, 1.0)]))))
    page.open(tmp_path / "large.html")
    assert page.run("timeline.state.step.start.length") == 100_000
    frames = page.run("""(() => { const took = [];
      for (let i = 0; i < 24; i++) {
        const length = timeline.state.length;
        timeline.look(i % 2 ? 0 : length * i / 48, length * (0.5 + i / 48));
        const began = performance.now();
        timeline.draw();
        took.push(performance.now() - began);
      }
      return took; })()""")
    middle = statistics.median(frames)
    print(f"a frame of 100,000 ops: {middle:.1f} ms in the middle, {max(frames):.1f} ms at most")
    # A screen shows a new picture every 17 ms; a machine that does other things meanwhile has longer.
    assert middle < 500


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", SLOW, [figures(1, 1.0)])
    assert main(["report", str(folder), "--out", str(tmp_path / "missing" / "page.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "there is no run folder" in capsys.readouterr().err
