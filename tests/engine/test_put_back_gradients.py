"""A rank's own partial gradients, saved in the middle of an accumulation and put back after other steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import assert_same, rows_of, snapshot
from tests.quick import full

STRATEGIES = {
    "zero 0": Strategy(bucket_mb=1e-4),
    "zero 1": Strategy(zero=1, bucket_mb=1e-4),
    "zero 1, shared": Strategy(zero=1, bucket_mb=1e-4, share_parameters=True),
    "zero 2, defer": Strategy(zero=2, bucket_mb=1e-4, accumulation="defer"),
    "zero 3, defer": Strategy(zero=3, bucket_mb=1e-4, accumulation="defer"),
    "zero 1, replicas": Strategy(zero=1, bucket_mb=1e-4, shard=2),
}


def stopped_and_gone_on(strategy: Strategy | None) -> dict[str, Tensor]:
    """As a job that is stopped within a step goes on: with weights, states and gradients as they were."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    if strategy is not None:
        model = pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def loss(seed: int) -> Tensor:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return model(rows_of(model, x)).square().mean() / 2

    def step(seed: int) -> None:
        loss(seed).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    if strategy is None:
        loss(1).backward()
    else:
        with pl.engine_of(model).no_sync():
            loss(1).backward()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = copy.deepcopy(optimizer.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    step(2)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    loss(3).backward()
    optimizer.step()
    found = snapshot(model)
    if strategy is not None:
        pl.release(model)
    return found


@pytest.mark.parametrize("name", [name if name in ("zero 1", "zero 3, defer") else full(name) for name in STRATEGIES])
def test_an_accumulation_goes_on_with_gradients_put_back(ranks, name: str) -> None:
    for found in ranks(4 if "replicas" in name else 2, stopped_and_gone_on, STRATEGIES[name]):
        assert_same(found, stopped_and_gone_on(None), atol=1e-12)
