"""Whole gradients are gathered by all ranks alike, and are what collectives of the loop's own are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, shares


def read_by_rank_0(strategy: Strategy) -> str:
    model = pl.parallelize(nn.Linear(6, 3), strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for _ in range(2):
            model(torch.randn(4, 6)).sum().backward()
            if pl.engine_of(model).world.rank == 0:
                model.weight.grad.abs().mean()
            optimizer.step()
    except pl.CommunicationError as error:
        pl.shutdown()
        return str(error)
    return ""


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_that_looks_alone_is_told_and_waits_for_nobody(ranks, zero) -> None:
    alone, other = ranks(2, read_by_rank_0, STAGES[f"zero {zero}"])
    assert "weight.grad (mean)" in alone and "every rank must do so, and one may print that" in alone
    assert "weight.grad (mean)" in other


def averaged_by_torch(zero: Any) -> float:
    """How far a gradient is from one process's that a loop averages over ranks once more, which it is already."""
    torch.manual_seed(0)
    model = nn.Linear(6, 9).double()
    weight = model.weight.detach().clone().requires_grad_()
    x = torch.randn(8, 6, dtype=torch.float64)
    F.linear(x, weight, model.bias.detach()).square().mean().backward()
    pl.parallelize(model, STAGES[f"zero {zero}"])(shares(x)).square().mean().backward()
    dist.all_reduce(model.weight.grad)
    model.weight.grad /= dist.get_world_size()
    off = float((model.weight.grad - weight.grad).abs().max())
    pl.release(model)
    return off


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_collectives_of_torchs_own_are_given_the_whole(ranks, zero) -> None:
    assert max(ranks(2, averaged_by_torch, zero)) < 1e-12
