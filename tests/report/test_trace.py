from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.core.errors import UserError
from paceline.core.events import Event, exposed_fraction
from paceline.core.ops import COMPUTE
from paceline.report.meetings import groups_of
from paceline.report.trace import chrome_trace, recorded_step
from tests.report.events import lines


def event(kind: str, target: str, stream: str, rank: int, start: float, end: float, **more) -> Event:
    return Event(kind, target, 0, "forward", stream, 8, 4, 4, more.pop("step", 3), rank, start, end, **more)


STEP = [
    event("forward", "blocks.0", "compute", 0, 10.0, 10.5),
    event("backward", "blocks.0", "compute", 0, 10.5, 11.0),
    event("all_reduce", "bucket 0", "reduce", 0, 10.9, 11.4, exposed=0.4),
    event("forward", "blocks.0", "compute", 1, 10.1, 10.6),
    event("backward", "blocks.0", "compute", 1, 10.6, 11.1),
    event("all_reduce", "bucket 0", "reduce", 1, 11.1, 11.4, exposed=0.3),
]


def drawn(events: list[Event]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = chrome_trace(events, groups_of(None, 2))["traceEvents"]
    return entries


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [json.dumps(e.to_dict()) for e in [event("forward", "x", "compute", 0, 1, 2, step=1), *STEP]]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_one_track_per_rank_and_stream_in_microseconds_from_the_first_event() -> None:
    slices = [entry for entry in drawn(STEP) if entry["ph"] == "X"]
    assert [(s["pid"], s["tid"]) for s in slices] == [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1)]
    assert slices[2]["name"] == "all_reduce bucket 0"
    assert slices[2]["ts"] == pytest.approx(0.9e6)
    assert slices[2]["dur"] == pytest.approx(0.5e6)
    assert slices[2]["args"]["exposed ms"] == pytest.approx(400)
    # As log lines and the page count.
    assert {s["args"]["step"] for s in slices} == {4}
    names = {e["args"]["name"] for e in drawn(STEP) if e["ph"] == "M" and "name" in e["args"]}
    assert names == {"rank 0", "rank 1", "compute", "reduce"}


def test_an_arrow_leads_from_the_rank_that_came_last_to_the_one_that_waited() -> None:
    start, finish = (next(e for e in drawn(STEP) if e["ph"] == ph) for ph in "sf")
    assert (start["pid"], finish["pid"]) == (1, 0)
    assert start["id"] == finish["id"]


def traced(run: Path, number: int | None) -> list[Event]:
    return list(recorded_step(run, number, []).events)


def test_the_last_step_is_taken_by_default_and_another_on_request(run: Path) -> None:
    assert traced(run, None) == traced(run, 4) == STEP
    assert [each.target for each in traced(run, 2)] == ["x"]


def test_a_step_that_was_done_again_is_told_of_once(run: Path) -> None:
    """As a run does that goes back to a checkpoint: its file has the step twice."""
    again = [replace(each, start=each.start + 100, end=each.end + 100) for each in STEP]
    with (run / "events.jsonl").open("a") as file:
        file.write(lines(again))
    assert traced(run, 4) == again


def test_a_step_without_events_names_those_that_have_some(run: Path) -> None:
    with pytest.raises(UserError, match="events of steps 2, 4"):
        recorded_step(run, 3, [])


def test_what_is_left_of_a_run_that_was_cut_off_is_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind": 1}\n{"kind": "forw')
    assert main(["trace", str(run)]) == 0
    shown = capsys.readouterr()
    assert len([e for e in json.loads((run / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]) == 6
    assert "trace.json: open it" in shown.out
    assert "ends in the middle of a line" in shown.err and "A line of events.jsonl is not what" in shown.err


def test_a_file_without_events_or_one_that_cannot_be_written_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out in ("step.json", "step.svg"):
        assert main(["trace", str(run), "--out", str(run / "missing" / out)]) == 2
        assert "cannot be written" in (told := capsys.readouterr().err) and told.count("\n") == 1
    (run / "events.jsonl").write_text('{"kind": 1}\n')
    assert main(["trace", str(run)]) == 2
    assert "not what a run writes" in (told := capsys.readouterr().err) and told.count("\n") == 1


def test_hosts_clocks_are_set_right(run: Path) -> None:
    ahead = [replace(each, start=each.start + 50, end=each.end + 50) if each.rank else each for each in STEP]
    (run / "events.jsonl").write_text(lines(ahead))
    starts = {each["ts"] for each in drawn(traced(run, 4)) if "ts" in each}
    assert max(starts) < 2e6


def test_a_picture_shows_every_kind_of_op_also_the_shortest(run: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the plot extra")
    assert main(["trace", str(prepared(run)), "--out", str(run / "step.svg")]) == 0
    picture = (run / "step.svg").read_text()
    # Text is drawn as outlines, and named in a comment.
    shown = re.findall(r"<!-- (.*?) -->", picture)
    for text in ("rank 1: reduce gradients", "rank 1: sum losses and norms", "copying, adding up", "blocks.0"):
        assert text in shown
    assert main(["trace", str(run), "--out", str(run / "step.png")]) == 0
    assert (run / "step.png").read_bytes().startswith(b"\x89PNG")


def prepared(run: Path) -> Path:
    """The run with an event of every kind on its own stream in its last step."""
    extra = [event(kind, "x", "compute", 1, 11.1, 11.1 + 1e-6) for kind in sorted(COMPUTE)]
    extra += [event("all_reduce", "statistics", "statistics", 1, 11.1, 11.1 + 1e-6)]
    with (run / "events.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(each.to_dict())}\n" for each in extra)
    return run


def test_the_trace_can_be_printed_and_nothing_else_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run), "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["traceEvents"]) > 6
    assert not (run / "trace.json").exists()
    assert main(["trace", str(run), "--json", str(run / "mine.json")]) == 0
    assert len(json.loads((run / "mine.json").read_text())["traceEvents"]) > 6


def test_a_run_without_events_names_the_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "log.events-every" in capsys.readouterr().err


def test_exposure_is_a_share_of_wall_time() -> None:
    assert exposed_fraction(STEP[:3], 2.0) == pytest.approx(0.2)
    assert exposed_fraction([], 0.0) == 0.0
