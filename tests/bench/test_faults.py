"""What kills cost, from logs made by hand and from a training that is really killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.cli import main
from paceline.bench.faults import recovery
from paceline.core.errors import UserError


def test_a_stall_is_what_a_usual_step_does_not_explain() -> None:
    # A step a second; killed at 3.5, the step after 3 is done at 6.5.
    found = recovery("", [(1, 1.0), (2, 2.0), (3, 3.0), (4, 6.5), (5, 7.5), (6, 8.5)], [3.5])
    assert (found.kills, found.median_seconds, found.worst_seconds, found.steps_repeated) == (1, 2.5, 2.5, 0)
    assert found.goodput == pytest.approx(5 / 7.5)
    assert (found.stopped, found.repeated, found.slower) == pytest.approx((2.5 / 7.5, 0, 0))


def test_steps_that_are_done_again_are_no_progress() -> None:
    steps = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0), (3, 6.0), (4, 7.0), (5, 8.0)]
    found = recovery("", steps, [3.2])
    assert (found.median_seconds, found.steps_repeated) == (3.0, 2)
    assert found.goodput == pytest.approx(4 / 7)
    assert (found.stopped, found.repeated, found.slower) == pytest.approx((1 / 7, 2 / 7, 0))


def test_slower_steps_are_told_apart() -> None:
    # With fewer ranks two steps take twice as long.
    found = recovery("", [(1, 1.0), (2, 2.0), (3, 4.0), (4, 6.0), (5, 8.0), (6, 9.0), (7, 10.0), (8, 11.0)], [2.5])
    assert found.goodput == pytest.approx(7 / 10)
    assert (found.stopped, found.repeated, found.slower) == pytest.approx((1 / 10, 0, 2 / 10))


@pytest.mark.full
def test_a_training_is_killed_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "faults.json"
    assert main(["faults", "--kills", "1", "--every", "1", "--preset", "nano", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4 and all(row["kills"] == 1 and row["goodput"] > 0 for row in rows)
    assert [row["steps_repeated"] > 0 for row in rows[:2]] == [False, False]
    assert len(capsys.readouterr().out.splitlines()) == 5


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
