"""What a GPU holds, beside what `memory` says of the schedule."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.memory import memory
from paceline.core.strategy import Strategy
from tests.gpu.devices import on_a_gpu, on_two_gpus, ranks_on_gpus

pytestmark = on_a_gpu

WIDTH, LAYERS = 1024, 6


def predicted_and_held(strategy: Strategy) -> tuple[int, int]:
    """Bytes after two steps, while gradients are still there."""
    device = pl.init().device
    low = strategy.precision != "float32"
    # The libraries that multiply take memory of their own when they first do, on each stream once.
    warm = nn.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16 if low else torch.float32)
    warm(torch.ones(8, WIDTH, device=device, dtype=warm.weight.dtype)).sum().backward()
    del warm
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    model = pl.parallelize(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(8, WIDTH, device=device)).float().square().mean().backward()
        optimizer.step()
    pl.engine_of(model).settle()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated(device) - before
    schedule = pl.engine_of(model).schedule
    # Gradients as wide as the optimizer's numbers last until `zero_grad`.
    predicted = memory(schedule).total + sum(buffer.bytes for buffer in schedule.buffers(1) if buffer.transient)
    pl.release(model)
    return predicted, held


PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "reduced in bfloat16": {"precision": "bfloat16", "reduce_in_float32": False},
}


def assert_close(predicted: int, held: int) -> None:
    # Blocks of 512 bytes, statistics, and a batch.
    assert held == pytest.approx(predicted, rel=0.03, abs=1 << 20)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_one_rank_holds_what_is_predicted(gpu: torch.device, zero: Any, precision: str) -> None:
    assert_close(*predicted_and_held(Strategy(zero=zero, **PRECISIONS[precision])))


@on_two_gpus
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_ranks_hold_what_is_predicted(zero: Any, precision: str) -> None:
    for predicted, held in ranks_on_gpus(2, predicted_and_held, Strategy(zero=zero, **PRECISIONS[precision])):
        assert_close(predicted, held)
