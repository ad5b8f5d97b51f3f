"""What a rank really holds in its steps: what the schedule says, a unit's gradients, and activations."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.memory import memory
from paceline.measuring.meters import held_bytes, watching_memory
from tests.engine.models import WORLDS
from tests.quick import some

MIB = 2**20
WIDTH, BLOCKS = 768, 24
SLACK = 26.0
"""MiB: a plain loop of one process takes 10 more than its tensors, for the kernels' own buffers, activations and what
the C library keeps of what was freed; a unit's gradients are at two places while they are collected; and threads."""


class Wide(nn.Module):
    """Parameters of 54 MiB, activations of next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def peak(strategy: pl.Strategy) -> tuple[float, float]:
    """(measured, predicted) MiB that a rank adds at most in the quietest of several windows of later steps."""
    cpu = torch.device("cpu")
    # Once before: kernels and the C library take buffers of their own when they are first used.
    train(strategy, 1)
    # What earlier jobs of this process left must not be freed while this one is measured.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pl.barrier()
    base = held_bytes(cpu)
    most, predicted = train(strategy, 5)
    return (most - base) / MIB, predicted / MIB


def train(strategy: pl.Strategy, windows: int) -> tuple[int, int]:
    """Bytes that this process holds at most from the third step on, and those that are predicted.

    Of several windows the least: what the C library keeps of freed memory comes and goes, and is not the engine's.
    """
    model = pl.parallelize(Wide(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    peaks = []
    for _ in range(windows):
        pl.barrier()
        with watching_memory(torch.device("cpu")) as most:
            for _ in range(2):
                step()
            pl.barrier()
            peaks.append(most())
    predicted = memory(pl.engine_of(model).schedule).total
    pl.barrier()
    pl.release(model)
    return min(peaks), predicted


LARGE = {
    name: (replace(strategy, bucket_mb=2.25), n)
    for name, (strategy, n) in WORLDS.items()
    if n == 2 or (strategy.shard and strategy.zero == 3)
}


QUICK = {"zero 3, N=2"}
"""That a host holds one copy where ranks share memory, test_one_copy.py tells in every run."""


@pytest.mark.parametrize("name", some(LARGE, QUICK))
def test_a_step_holds_no_more_than_its_schedule_says(ranks, name) -> None:
    strategy, n = LARGE[name]
    for found, predicted in ranks(n, peak, strategy):
        assert 0.95 * predicted < found < predicted + SLACK
