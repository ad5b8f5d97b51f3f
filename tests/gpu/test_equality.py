"""On GPUs, too, N ranks equal one process: every stage, accumulation and way to recompute."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.strategy import Strategy
from tests.gpu.devices import late_collectives, on_a_gpu, on_two_gpus, ranks_on_gpus
from tests.gpu.loop import CASES, POLICIES, assert_same, in_parallel, make, train

pytestmark = on_a_gpu


@functools.cache
def expected(dtype: torch.dtype) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    return train(make(dtype, device), dtype, device)


@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_a_plain_model(gpu: torch.device, name: str) -> None:
    assert_same(in_parallel(CASES[name], torch.float64), expected(torch.float64), atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_in_bfloat16_it_comes_close_to_one_in_float32(gpu: torch.device, name: str) -> None:
    low = replace(CASES[name], precision="bfloat16")
    assert_same(in_parallel(low, torch.float32), expected(torch.float32), atol=5e-2)


def late(strategy: Strategy, seed: int) -> dict[str, Any]:
    with late_collectives(seed):
        return in_parallel(strategy, torch.float64)


@on_two_gpus
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_late_collectives_equal_a_plain_model(name: str) -> None:
    for found in ranks_on_gpus(2, late, CASES[name], 0):
        assert_same(found, expected(torch.float64), atol=1e-11)


@on_two_gpus
@pytest.mark.parametrize("name", POLICIES)
def test_two_ranks_in_bfloat16_come_close_to_float32(name: str) -> None:
    low = replace(POLICIES[name], precision="bfloat16")
    for found in ranks_on_gpus(2, in_parallel, low, torch.float32):
        assert_same(found, expected(torch.float32), atol=5e-2)
