"""What a rank really holds in its steps: what the schedule says, a unit's gradients, and activations."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.bench.meters import held_bytes, watching_memory
from paceline.engine.freed import return_freed_memory
from paceline.memory import memory
from tests.engine.models import WORLDS

MIB = 2**20
WIDTH, BLOCKS = 768, 16
SLACK = 22.0
"""MiB: a plain loop of one process takes 10 more than its tensors, for the kernels' own buffers, activations and what
the C library has not given back; a unit's gradients are at two places while they are collected; and threads."""


class Wide(nn.Module):
    """Parameters of 36 MiB, activations of next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def peak(strategy: pl.Strategy) -> tuple[float, float]:
    """(measured, predicted) MiB that a rank adds, at most in the third and later steps."""
    cpu = torch.device("cpu")
    # The same once before: a process that was forked gets pages of its own as it first writes to them.
    train(strategy, 2)
    # What earlier jobs of this process left must not be freed while this one is measured.
    gc.collect()
    return_freed_memory()
    pl.barrier()
    base = held_bytes(cpu)
    most, predicted = train(strategy, 5)
    return (most - base) / MIB, predicted / MIB


def train(strategy: pl.Strategy, steps: int) -> tuple[int, int]:
    """Bytes that this process holds at most from the third step on, and those that are predicted."""
    model = pl.parallelize(Wide(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    pl.barrier()
    with watching_memory(torch.device("cpu")) as most:
        for _ in range(steps - 2):
            step()
        pl.barrier()
        found = most()
    predicted = memory(pl.engine_of(model).schedule).total
    pl.barrier()
    pl.release(model)
    return found, predicted


LARGE = {
    name: (replace(strategy, bucket_mb=2.25), n)
    for name, (strategy, n) in WORLDS.items()
    if n == 2 or (strategy.shard and strategy.zero == 3)
}


@pytest.mark.parametrize("name", LARGE)
def test_a_step_holds_no_more_than_its_schedule_says(ranks, name) -> None:
    strategy, n = LARGE[name]
    for found, predicted in ranks(n, peak, strategy):
        assert 0.95 * predicted < found < predicted + SLACK
