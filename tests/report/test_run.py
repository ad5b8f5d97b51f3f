"""Runs' folders as they are found: whole, cut off, damaged, empty, too large."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.events import Event
from paceline.report.lines import Damage, read_lines
from paceline.report.recordings import choose, find_recordings, read_recording, read_recordings, slowest, typical
from paceline.report.run import Run, read_run
from tests.report.events import SLOW, compute, figures, lines, write_run


def shifted(step: int, seconds: float = 0.0, scale: float = 1.0) -> list[Event]:
    """The slow example as another step."""
    return [replace(e, step=step, start=seconds + e.start * scale, end=seconds + e.end * scale) for e in SLOW]


def read(folder: Path, **arguments: int) -> Run:
    return read_run(folder, **arguments)


def test_a_run_is_what_it_wrote(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "r", [*shifted(9), *shifted(19, 100)], [figures(10, 1.0), figures(20, 2.0)]))
    assert run.problems == ()
    assert (run.name, run.world_size, run.facts.host, run.history.steps) == ("r", 2, "here", 20)
    assert [step.number for step in run.steps] == [10, 20]
    assert run.config is not None and run.config.steps == 100
    assert run.steps[1].events == tuple(shifted(19, 100))


def test_a_run_that_was_cut_off_in_the_middle_of_a_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path, shifted(9), [figures(10, 1.0)])
    for name in ("events.jsonl", "metrics.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(text + text.splitlines()[0][:40])
    run = read(folder)
    assert len(run.steps) == 1 and run.history.steps == 10
    assert [problem.split(",")[0] for problem in run.problems] == [
        "metrics.jsonl ends in the middle of a line",
        "events.jsonl ends in the middle of a line",
    ]


def test_lines_that_a_disk_lost_are_counted(tmp_path: Path) -> None:
    damaged = [*shifted(9), "text", {"kind": 3}, replace(SLOW[0], step=9, start=5.0, end=4.0).to_dict()]
    folder = write_run(tmp_path, damaged, [figures(10, 1.0), {"loss": 1}, []])
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b"\0" * 4096 + b"\n" + b"[" * 100_000 + b"\n\xff\n")
    run = read(folder)
    assert len(run.steps[0].events) == len(SLOW)
    # What is longer than a line may be is more than one.
    assert "lines of events.jsonl are not what a run writes" in run.problems[1]
    assert run.problems[0].startswith("2 lines of metrics.jsonl")


def test_a_rank_without_events_is_named(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, [event for event in shifted(9) if event.rank == 0], [figures(10, 1.0)]))
    assert run.world_size == 2
    assert "Step 10 has no events of rank 1:" in run.problems[0]
    assert not run.steps[0].meetings[0].is_whole


def test_clocks_that_jump_are_told(tmp_path: Path) -> None:
    jumped = [
        replace(e, start=e.start + 900, end=e.end + 900) if e.rank and e.kind == "all_reduce" else e for e in SLOW
    ]
    more = [replace(e, target="1") for e in SLOW if e.kind == "all_reduce"]
    run = read(write_run(tmp_path, sorted([*jumped, *more], key=lambda e: e.rank), [figures(1, 1.0)]))
    assert "jumped" in run.problems[0]


def test_an_empty_run_and_an_empty_folder(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "empty"))
    assert run.steps == () and run.typical is None and run.slowest is None
    assert [problem.split(":")[0] for problem in run.problems] == [
        "metrics.jsonl holds no figures",
        "events.jsonl holds no events, so there is no timeline",
    ]
    (tmp_path / "nothing").mkdir()
    assert len(read(tmp_path / "nothing").problems) == 4


def test_settings_of_another_version_are_no_reason_to_show_nothing(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, shifted(9), [figures(10, 1.0)], config="unknown: 1\n"))
    assert run.config is None and len(run.steps) == 1
    assert "settings cannot be read" in run.problems[0]


def test_settings_that_do_not_suit_the_ranks_are_not_believed(tmp_path: Path) -> None:
    config = "strategy: {zero: 3, shard: 3}\n"
    assert len(read(write_run(tmp_path, shifted(9), [figures(10, 1.0)], config=config)).steps[0].meetings) == 1


def test_of_a_step_that_was_done_again_the_last_time_counts(tmp_path: Path) -> None:
    for again in (shifted(9, 50), shifted(9, 0)):
        (tmp_path / "events").write_text(lines([*shifted(9), *shifted(19, 10), *again]))
        places = find_recordings(tmp_path / "events", Damage()).places
        # Step 20 was lost when the run went back to before step 10.
        assert [(place.step, place.count) for place in places] == [(9, 8)]
        assert read_recording(tmp_path / "events", places[0], 100).events == tuple(again)


def test_a_step_of_one_rank_that_was_done_again_at_once(tmp_path: Path) -> None:
    alone = [compute("forward", 0, 0, 1), compute("forward", 0, 1, 2, planned=False), compute("update", 0, 2, 3)]
    (tmp_path / "events").write_text(lines([*alone, *(replace(event, end=event.end + 5) for event in alone)]))
    (place,) = find_recordings(tmp_path / "events", Damage()).places
    assert place.count == 3 and place.seconds == 8


def test_typical_and_slowest(tmp_path: Path) -> None:
    events = [event for number, scale in enumerate((1, 9, 2, 3)) for event in shifted(number, 100 * number, scale)]
    run = read(write_run(tmp_path, events, [figures(4, 1.0)]))
    assert run.typical is not None and run.typical.number == 3
    assert run.slowest is not None and run.slowest.number == 2
    assert (typical(run.places).step, slowest(run.places).step) == (2, 1)


def test_a_run_with_too_many_events_is_sampled_and_says_so(tmp_path: Path) -> None:
    scales = [1.0] * 50
    scales[17] = 5.0
    events = [event for number, scale in enumerate(scales) for event in shifted(number, 100 * number, scale)]
    run = read(write_run(tmp_path, events, [figures(50, 1.0)]), most=80)
    numbers = [step.number for step in run.steps]
    assert len(numbers) == 10 and {1, 18, 50} <= set(numbers)
    assert "recorded 400 events of 50 steps" in run.problems[0] and "shows 10 of" in run.problems[0]


def test_a_step_with_too_many_events_keeps_whole_ranks(tmp_path: Path) -> None:
    events = [replace(event, rank=rank) for rank in range(40) for event in SLOW[:4]]
    run = read(write_run(tmp_path, events, [figures(1, 1.0)], ranks=40), most=20)
    assert run.steps[0].recording.ranks == (0, 9, 19, 29, 39)
    assert "160 events; 20 of them are shown, of 5 of its 40 ranks" in run.problems[0]
    (place,) = run.places
    assert len(read_recording(tmp_path / "events.jsonl", place, 2).events) == 2
    assert choose([place], 1) == [place]


def test_a_run_that_went_on_with_other_ranks_lacks_none(tmp_path: Path) -> None:
    alone = [replace(event, step=step) for step in (10, 11) for event in SLOW if event.rank == 0]
    rows = [
        figures(1, 1.0, memory__peak_bytes=7.0),
        {"step": 10, "time": 2.0, "run/resumed_from": 10, "run/ranks": 1},
        figures(12, 3.0, memory__peak_bytes=5.0),
    ]
    run = read(write_run(tmp_path / "fewer", [*SLOW, *alone], rows, ranks=1))
    assert not [problem for problem in run.problems if "has no events of rank" in problem]
    assert run.world_size == 2 and run.history.most("memory/peak_bytes") == 7
    more = [*(replace(event, step=0) for event in alone[:4]), *(replace(event, step=10) for event in SLOW)]
    run = read(write_run(tmp_path / "more", more, rows, ranks=2))
    assert not [problem for problem in run.problems if "has no events of rank" in problem]
    run = read(write_run(tmp_path / "missing", alone, rows, ranks=2))
    assert len([problem for problem in run.problems if "has no events of rank 1" in problem]) == 2


CONTENT = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from([json.dumps(e.to_dict()).encode() for e in SLOW]),
        st.dictionaries(
            st.sampled_from(["step", "time", "train/loss", "run/resumed_from"]), st.floats() | st.integers()
        )
        .map(json.dumps)
        .map(str.encode),
    ),
    max_size=8,
).map(b"\n".join)


@given(CONTENT, CONTENT)
def test_whatever_the_files_hold_is_a_run(
    tmp_path_factory: pytest.TempPathFactory, events: bytes, metrics: bytes
) -> None:
    folder = write_run(tmp_path_factory.getbasetemp() / "drawn")
    # Reading settings would take most of the time.
    (folder / "config.yaml").unlink(missing_ok=True)
    (folder / "events.jsonl").write_bytes(events)
    (folder / "metrics.jsonl").write_bytes(metrics)
    run = read(folder)
    for step in run.steps:
        assert step.ranks and (step.path or not step.seconds)
    assert run.history.goodput is None or run.history.goodput.seconds > 0


def test_a_part_of_a_file_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_text("1\n2\n3\n")
    decoder = msgspec.json.Decoder(int)
    found = [(line.value, line.start, line.stop) for line in read_lines(tmp_path / "numbers", decoder, Damage(), 2, 4)]
    assert found == [(2, 2, 4)]


@pytest.mark.parametrize("most", [2000, 10_000, 30_000])
def test_of_a_large_file_steps_that_are_spread_over_it_are_looked_at(tmp_path: Path, most: int) -> None:
    path = tmp_path / "events"
    path.write_text(lines(event for number in range(200) for event in shifted(number, 100 * number)) + '{"kind": "for')
    size = path.stat().st_size
    found = find_recordings(path, damage := Damage(), most)
    assert not found.is_whole and damage.is_cut and damage.lines == 0
    steps = [place.step for place in found.places]
    assert steps[0] == 0 and steps[-1] == 199 and steps == sorted(set(steps))
    # All of them are whole, and no more is read than was asked for, but for the first and the last steps.
    assert {place.count for place in found.places} == {8}
    length = found.places[0].stop
    assert sum(place.stop - place.start for place in found.places) < most + 4 * length < size
    assert max(b - a for a, b in pairwise(steps)) < 200 * 4 * length / most + 4
    for place in found.places:
        assert read_recording(path, place, 100).events == tuple(shifted(place.step, 100 * place.step))
    problems: list[str] = []
    assert len(read_recordings(path, found, 24, problems)) == 3
    assert f"about {float(f'{1600:.2g}'):,.0f} events" in problems[0] and f"{len(steps)} were looked at" in problems[0]


def test_a_large_file_of_few_steps_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for count in (1, 2, 3):
        path.write_text(lines(event for number in range(count) for event in shifted(number)))
        found = find_recordings(path, Damage(), 100)
        assert [place.step for place in found.places] == list(range(count)) and found.is_whole
    path.write_text("no event\n" * 100)
    assert find_recordings(path, damage := Damage(), 100) == ([], True) and damage.lines == 100
