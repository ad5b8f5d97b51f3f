"""A training that goes on from a checkpoint is the training that never stopped."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
import torch

from paceline.core.strategy import SYSTEMS, Strategy
from tests.checkpoint.training import resumed, saved
from tests.engine.models import STAGES, assert_same
from tests.quick import diagonal, full, pairwise, some
from tests.ranks import RankPool

KINDS = {
    **STAGES,
    "hybrid": Strategy(zero=2, shard=2, bucket_mb=1e-4),
    "hybrid zero 3": Strategy(zero=3, shard=2, bucket_mb=1e-4),
    "shared parameters": Strategy(zero=2, share_parameters=True, bucket_mb=1e-4),
    "parameter server": SYSTEMS["parameter server"],
}
RANKS = {"hybrid": 4, "hybrid zero 3": 4}
LOW = {
    "bfloat16": replace(STAGES["zero 2"], precision="bfloat16"),
    "bfloat16, zero 3": replace(STAGES["zero 3"], precision="bfloat16"),
    "bfloat16, shared parameters": Strategy(zero=1, precision="bfloat16", share_parameters=True),
    "bfloat16, zero 0": Strategy(precision="bfloat16"),
}


QUICK = {(name, "at once" if name in ("zero 0", "zero 2") else "in the background") for name in STAGES}
"""Every stage; what else there is goes on elsewhere, below."""


@pytest.mark.parametrize(
    ("name", "background"), diagonal(KINDS.keys(), {"at once": False, "in the background": True}, quick=QUICK)
)
def test_the_same_job_goes_on_to_the_bit(ranks, tmp_path: Path, name: str, background: bool) -> None:
    n, folder = RANKS.get(name, 2), tmp_path / "checkpoints" / "step-00000003"
    expected = ranks(n, saved, folder, KINDS[name], "AdamW", 0.3, torch.float64, background)
    # From the folder of checkpoints: the latest.
    for found, before in zip(ranks(n, resumed, folder.parent, KINDS[name], "AdamW", 0.3), expected, strict=True):
        assert_same(found, before, atol=0)


@pytest.mark.parametrize("name", some(LOW, {"bfloat16, zero 0", "bfloat16, zero 3"}))
def test_in_low_precision_too(ranks, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "at 3"
    expected = ranks(2, saved, folder, LOW[name], "AdamW", 0.3, torch.float32)
    for found, before in zip(ranks(2, resumed, folder, LOW[name], "AdamW", 0.3, torch.float32), expected, strict=True):
        assert_same(found, before, atol=0)


@pytest.mark.parametrize(
    ("zero", "has_stepped"), [(1, True), full(3, False), full(0, True), full(3, True), full(1, False)]
)
def test_what_int8_owes_of_gradients_goes_on_too(
    ranks, tmp_path: Path, zero: Literal[0, 1, 3], has_stepped: bool
) -> None:
    strategy, folder = Strategy(zero=zero, wire="int8", bucket_mb=1e-4), tmp_path / "at 3"
    sgd = ("SGD", 0.0, torch.float32)
    expected = ranks(2, saved, folder, strategy, *sgd, transport="tcp")
    found = ranks(2, resumed, folder, strategy, *sgd, has_stepped, transport="tcp")
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, atol=0)
    # Other ranks owe nothing of what these have sent.
    for one in ranks(3, resumed, folder, strategy, *sgd, transport="tcp"):
        assert_same(one, expected[0], atol=1e-2)


MATRIX = {
    f"{name}, N={n}": (strategy, n)
    for name, strategy in KINDS.items()
    for n in (1, 2, 3, 4)
    if not (strategy.shard and n != 4) and not (strategy.share_parameters and n == 1)
}
PAIRS = [
    ("zero 0, N=2", "zero 3, N=3"),
    ("zero 3, N=3", "zero 1, N=2"),
    ("hybrid, N=4", "zero 0, N=1"),
    ("zero 2, N=1", "hybrid zero 3, N=4"),
    ("parameter server, N=2", "shared parameters, N=2"),
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_another_number_of_ranks_at_another_stage_goes_on(ranks, tmp_path: Path, before: str, after: str) -> None:
    saves_then_resumes(ranks, tmp_path, before, [after])


MET: dict[str, list[str]] = {}
"""Jobs that go on from what each saved. Not all from all, which meet in files alone: every kind goes on as every other,
every number of ranks as every other, and among them, so that all pairs of these four are met."""
_KIND_AND_RANKS = [tuple(name.split(", N=")) for name in MATRIX]
for *before, kind, n in pairwise((*saves, *goes_on) for saves, goes_on in product(_KIND_AND_RANKS, _KIND_AND_RANKS)):
    MET.setdefault(", N=".join(before), []).append(f"{kind}, N={n}")


@pytest.mark.full
@pytest.mark.parametrize("before", MET)
def test_every_number_of_ranks_at_every_stage_goes_on(ranks, tmp_path: Path, before: str) -> None:
    # As many ranks after each other stay in their job.
    saves_then_resumes(ranks, tmp_path, before, sorted(MET[before], key=lambda name: MATRIX[name][1]))


def saves_then_resumes(ranks: RankPool, folder: Path, before: str, after: list[str]) -> None:
    strategy, n = MATRIX[before]
    (expected, *_) = ranks(n, saved, folder / "at 3", strategy)
    for name in after:
        strategy, n = MATRIX[name]
        for found in ranks(n, resumed, folder / "at 3", strategy):
            assert_same(found, expected)


@pytest.mark.parametrize(
    "optimizer", ["SGD", full("Adagrad"), full("RMSprop"), full("NAdam"), full("ASGD"), full("Rprop"), full("Adadelta")]
)
def test_other_optimizers_states(ranks, tmp_path: Path, optimizer: str) -> None:
    (expected, *_) = ranks(3, saved, tmp_path / "at 3", STAGES["zero 3"], optimizer)
    for n, strategy in ((2, STAGES["zero 1"]), (1, STAGES["zero 0"])):
        for found in ranks(n, resumed, tmp_path / "at 3", strategy, optimizer):
            assert_same(found, expected)
