"""Each check passes a good run and finds what is wrong with a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.faults.outcome import curve, wrong_with_checkpoints, wrong_with_curve, wrong_with_end

GOOD = {1: (5.0, 1.0, 64), 2: (4.0, 1.0, 128), 3: (3.5, 1.0, 192)}


def test_the_same_curve_is_right() -> None:
    assert wrong_with_curve(dict(GOOD), GOOD) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({1: GOOD[1], 3: GOOD[3]}, "steps [2] are missing"),
        ({**GOOD, 4: GOOD[3]}, "steps [4] are not of this run"),
        ({**GOOD, 3: (3.5000000000000004, 1.0, 192)}, "step 3"),
        ({**GOOD, 2: (4.0, 1.0, 120)}, "step 2"),
    ],
    ids=["a lost step", "a step too many", "the last bit of a loss", "lost tokens"],
)
def test_another_curve_is_wrong(found: dict[int, tuple[float, ...]], words: str) -> None:
    (wrong,) = wrong_with_curve(found, GOOD)
    assert words in wrong


def test_the_last_of_a_repeated_step_counts_and_half_a_line_does_not(tmp_path: Path) -> None:
    lines = [{"step": 1, "train/loss": loss, "train/grad_norm": 1.0, "train/tokens": 64} for loss in (9.0, 5.0)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 2, "train/lo')
    assert curve(tmp_path) == {1: (5.0, 1.0)}


def test_a_run_without_a_checkpoint_is_wrong(tmp_path: Path) -> None:
    assert wrong_with_checkpoints(tmp_path) == ["there is no checkpoint"]


def test_what_outlived_its_job_is_named() -> None:
    assert wrong_with_end({}) == []
    assert wrong_with_end({7: "rank 1"}) == ["process 7 was left: rank 1"]
