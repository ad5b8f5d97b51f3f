"""Which strategy when: the sources' rule, derived from numbers, and the cases where it is wrong (docs/planning.md)."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from paceline.models.flops import parameter_count

RULE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "rule_tables.py"))
by_stage, with_tensor_ranks = RULE["by_stage"], RULE["with_tensor_ranks"]


@pytest.mark.full
def test_where_all_fits_ddp_is_right_but_sharding_the_optimizer_is_no_slower() -> None:
    """1.2 billion parameters on 8 A100: DDP fits, and takes 24 ms for an update that is shared out from stage 1 on."""
    found = by_stage("llama-1b", "a100", 8, 16, 2048)
    assert all(each.fits for each in found.values())
    assert found[1].seconds < found[0].seconds < 1.05 * found[1].seconds
    assert found[0].optimizer > 7 * found[1].optimizer
    assert found[0].memory.peak > found[1].memory.peak > found[3].memory.peak


@pytest.mark.full
def test_where_parameters_and_gradients_fit_zero_2_is_right() -> None:
    """8 billion on 8 H100: DDP misses; stage 2 is as fast as 3, which computes the same and gathers more."""
    found = by_stage("llama-8b", "h100", 8, 8, 8192)
    assert not found[0].fits and found[1].fits and found[2].fits and found[3].fits
    assert found[2].seconds <= 1.005 * found[3].seconds
    assert found[2].seconds < found[1].seconds, "whole gradients leave stage 1 less room: it recomputes more"


@pytest.mark.full
def test_where_they_do_not_fit_zero_3_is_the_only_one() -> None:
    found = by_stage("llama-70b", "h100", 256, 2, 8192)
    assert [stage for stage, each in found.items() if each.fits] == [3]


@pytest.mark.parametrize(("devices", "wins"), [(512, 1), (2048, 4), (4096, 8)])
def test_100_billion_need_tensor_parallelism_only_where_samples_are_few(devices: int, wins: int) -> None:
    """With 2,048 samples a step: 4 for each of 512 devices are enough to hide what ZeRO-3 moves; 4,096 have none."""
    assert parameter_count(RULE["HUNDRED"]) == pytest.approx(98.3e9, rel=1e-3)
    took = with_tensor_ranks(devices)
    assert min(took, key=took.__getitem__) == wins
    assert (1 in took) == (devices <= RULE["BATCH"])
