"""Each check passes a good run and finds what is wrong with a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.faults.outcome import Job, curve, jobs, wrong_with_checkpoints, wrong_with_curve

GOOD = {1: (5.0, 1.0), 2: (4.0, 1.0), 3: (3.5, 1.0)}
LAST_BIT = {**GOOD, 3: (3.5000000000000004, 1.0)}


def test_the_same_curve_is_right() -> None:
    assert wrong_with_curve(dict(GOOD), GOOD) == []


@pytest.mark.parametrize(
    ("found", "rounding", "words"),
    [
        ({1: GOOD[1], 3: GOOD[3]}, False, "steps 2 are missing"),
        ({**GOOD, 4: GOOD[3]}, False, "steps 4 are not of this run"),
        (LAST_BIT, False, "step 3"),
        ({**GOOD, 2: (4.0, 1.001)}, False, "step 2"),
        ({**GOOD, 2: (4.02, 1.0)}, True, "step 2"),
        ({**GOOD, 2: (float("nan"), 1.0)}, True, "step 2"),
    ],
    ids=["a lost step", "a step too many", "the last bit of a loss", "a norm", "other samples", "no number"],
)
def test_another_curve_is_wrong(found: dict[int, tuple[float, ...]], rounding: bool, words: str) -> None:
    (wrong,) = wrong_with_curve(found, GOOD, rounding)
    assert words in wrong


def test_rounding_and_a_step_that_was_done_but_not_logged_are_right_where_they_are_expected() -> None:
    assert wrong_with_curve(LAST_BIT, GOOD, rounding=True) == []
    assert wrong_with_curve({1: GOOD[1], 3: GOOD[3]}, GOOD, unlogged=[2]) == []


def test_the_last_of_a_repeated_step_counts_and_half_a_line_does_not(tmp_path: Path) -> None:
    lines = [{"step": 1, "train/loss": loss, "train/grad_norm": 1.0, "train/tokens": 64} for loss in (9.0, 5.0)]
    lines.insert(1, {"step": 0, "run/ranks": 2, "run/resumed_from": 0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 2, "train/lo')
    assert curve(tmp_path) == {1: (5.0, 1.0)}
    assert jobs(tmp_path) == [Job(ranks=2, after=0, seconds=None)]


def test_one_of_the_two_latest_checkpoints_must_be_whole(tmp_path: Path) -> None:
    assert "is not there" in wrong_with_checkpoints(tmp_path)[0]
    model = pl.parallelize(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    files = []
    for step in (1, 2, 3):
        pl.save(tmp_path / "checkpoints" / f"step-{step:08}", model, optimizer, step=step)
        files.append(tmp_path / "checkpoints" / f"step-{step:08}" / "rank-00000.safetensors")
    pl.release(model)
    for file, wrong in zip(reversed(files), (0, 2), strict=False):
        assert wrong_with_checkpoints(tmp_path) == []
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert len(wrong_with_checkpoints(tmp_path)) == wrong, "the third latest is too old"
