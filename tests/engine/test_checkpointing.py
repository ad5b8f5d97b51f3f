"""torch's own activation checkpointing inside a model, reentrant or not, even of a block that runs twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline as pl
from paceline.strategy import Strategy
from tests.engine.models import Stack, assert_all_same, every_world, gradients, loss_on, make


class Checkpointed(Stack):
    """Recomputes its blocks; one parameter is used in two of them."""

    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        if shared:
            self.blocks[2] = self.blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def recomputed(model: nn.Module) -> list[dict]:
    found = []
    for step in range(2):
        model.zero_grad()
        loss_on(model, step).backward()
        found.append(gradients(model))
    return found


def recomputed_in_parallel(strategy: Strategy, reentrant: bool, shared: bool) -> tuple[list[dict], bool]:
    model = pl.parallelize(make(Checkpointed, reentrant, shared), strategy)
    engine = pl.engine_of(model)
    found = recomputed(model)
    executed = [event.target for event in engine.drain_events() if event.stream == "reduce" and event.step == 1]
    as_planned = executed == [op.target for op in engine.schedule.step(1) if op.stream == "reduce"]
    pl.release(model)
    return found, as_planned


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@every_world
def test_checkpointing_of_both_kinds_even_of_a_shared_block(ranks, reentrant, shared, strategy, n) -> None:
    expected = recomputed(make(Checkpointed, reentrant, shared))
    for found, as_planned in ranks(n, recomputed_in_parallel, strategy, reentrant, shared):
        assert_all_same(found, expected)
        assert as_planned, "from the second step on, late units are scheduled after backward"
