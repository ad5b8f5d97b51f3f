"""What kills cost, from logs made by hand and from a training that is really killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.bench.cli import main
from paceline.bench.faults import recovery
from paceline.bench.recovery_log import LoggedStep, RecoveryLog, read_log
from paceline.core.errors import UserError
from paceline.train.interruption import PARTS


def log(*jobs: Sequence[tuple[int, float]], ranks: Sequence[int] = (), rejoins: Sequence[float] = ()) -> RecoveryLog:
    steps = [LoggedStep(*step, [*ranks, 2, 2, 2][job], job) for job, steps in enumerate(jobs) for step in steps]
    return RecoveryLog(steps, [*rejoins])


def test_a_stall_is_what_a_usual_step_does_not_explain() -> None:
    # A step a second; killed at 3.5, the step after 3 is done at 6.5.
    found = recovery("", log([(1, 1.0), (2, 2.0), (3, 3.0)], [(4, 6.5), (5, 7.5), (6, 8.5)]), [3.5])
    assert (found.kills, found.median_seconds, found.worst_seconds, found.steps_repeated) == (1, 2.5, 2.5, 0)
    assert found.goodput == pytest.approx(5 / 7.5)
    assert (found.stopped, found.repeated, found.slower) == pytest.approx((2.5 / 7.5, 0, 0))
    assert (found.rejoins, found.rejoin_seconds, found.joining) == (0, None, 0)


def test_a_step_that_the_killed_rank_had_done_its_part_of_is_before_the_stall() -> None:
    found = recovery("", log([(1, 1.0), (2, 2.0), (3, 3.0)], [(4, 6.5), (5, 7.5), (6, 8.5)]), [2.9])
    assert found.median_seconds == 2.5 and found.stopped == pytest.approx(2.5 / 7.5)


def test_steps_that_are_done_again_are_no_progress() -> None:
    steps = log([(1, 1.0), (2, 2.0), (3, 3.0)], [(2, 5.0), (3, 6.0), (4, 7.0), (5, 8.0)])
    found = recovery("", steps, [3.2])
    assert (found.median_seconds, found.steps_repeated) == (3.0, 2)
    assert found.goodput == pytest.approx(4 / 7)
    assert (found.stopped, found.repeated, found.slower) == pytest.approx((1 / 7, 2 / 7, 0))


def test_slower_steps_are_told_apart() -> None:
    # With one rank steps take twice as long; the other comes back after 5, which costs half a second.
    steps = log(
        [(1, 1.0), (2, 2.0)],
        [(3, 4.5), (4, 6.5), (5, 8.5)],
        [(6, 10.0), (7, 11.0), (8, 12.0)],
        ranks=(2, 1, 2),
        rejoins=[9],
    )
    found = recovery("", steps, [2.5])
    assert (found.median_seconds, found.rejoins, found.rejoin_seconds) == (0.5, 1, 0.5)
    assert found.goodput == pytest.approx(7 / 11)
    assert (found.stopped, found.joining, found.repeated) == pytest.approx((0.5 / 11, 0.5 / 11, 0))
    assert found.slower == pytest.approx(3 / 11)


def test_a_log_tells_kills_from_rejoins(tmp_path: Path) -> None:
    parts = {f"interruption/{part}_seconds": 0.25 for part in PARTS}
    lines: list[dict[str, float]] = [
        {"step": 1, "time": 1.0, "train/loss": 1.0},
        {"step": 1, "time": 1.5, "run/ranks": 1, "run/resumed_from": 1},
        {"step": 2, "time": 2.0, **parts},
        {"step": 2, "time": 2.0, "train/loss": 1.0},
        {"step": 2, "time": 2.5, "run/ranks": 2, "run/resumed_from": 2},
        {"step": 3, "time": 3.0, **parts},
        {"step": 3, "time": 3.0, "train/loss": 1.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "ti')
    found = read_log(file, 2)
    assert [(step.ranks, step.job) for step in found.steps] == [(2, 0), (1, 1), (2, 2)]
    assert [step.number for step in found.new] == [1, 2, 3]
    assert found.rejoins == [2.5] and len(found.after_losses) == len(found.after_rejoins) == 1
    assert read_log(tmp_path / "none", 2).new == []


@pytest.mark.full
def test_a_training_is_killed_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "faults.json"
    assert main(["faults", "--kills", "1", "--every", "1", "--preset", "nano", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4 and all(row["kills"] == 1 and row["goodput"] > 0 for row in rows)
    assert [row["steps_repeated"] > 0 for row in rows[:2]] == [False, False]
    assert all(row["parts"]["meeting"] > 0 for row in rows[:3]) and rows[3]["parts"] == {}
    out = capsys.readouterr().out
    assert "a spare, from memory: kill" in out and "goodput, and lost: stopped" in out


@pytest.mark.full
def test_a_training_that_does_not_go_on_is_told_with_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "faults.json"
    # Torchrun would start it again for as long.
    monkeypatch.setattr("paceline.bench.faults._PATIENCE_SECONDS", 5.0)
    assert main(["faults", "--kills", "1", "--every", "1", "--preset", "none", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["rows"] == [] and [each["kills"] for each in found["failures"]] == [0] * 4
    assert capsys.readouterr().out.count("the training does not go on: python -m ") == 4


@pytest.mark.parametrize("flags", [["--kills", "0"], ["--workers", "1"]])
def test_what_cannot_be_measured_is_refused(flags: list[str]) -> None:
    with pytest.raises(UserError, match="expected at least 2 workers and 1 kill"):
        main(["faults", *flags])
