"""torch.func with a parallel model: gradients of each sample beside its training, and of inputs inside of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, data, make, shares, snapshot
from tests.quick import some
from tests.ranks import RankError


def per_sample(strategy: Strategy | None, keeps: bool = False) -> tuple[list[dict], dict]:
    """Gradients of each sample by torch.func before each step, and what the steps came to."""
    model = make()
    kept = [parameter.data for parameter in model.parameters()] if keeps else []
    if strategy is not None:
        pl.parallelize(model, strategy)
        if keeps:
            with pl.full_parameters(model):
                kept += [parameter.data for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for step in range(3):
        x, y = data(step, 12)
        own, target = (shares(x), shares(y)) if strategy is not None else (x, y)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(weights: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(torch.func.functional_call(model, weights, (x[None],)), y[None])

        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
        found.append({name: value.clone() for name, value in each.items()})
        F.mse_loss(model(own), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found, snapshot(model)


@pytest.mark.parametrize("name", some(STAGES, {"zero 0", "zero 2"}))
def test_gradients_of_each_sample_by_torch_func(ranks, name) -> None:
    expected, weights = per_sample(None)
    if name == "zero 3":
        with pytest.raises(RankError, match="outside of forward and backward"):
            ranks(2, per_sample, STAGES[name])
        return
    for found, state in ranks(2, per_sample, STAGES[name]):
        assert_same(state, weights)
        for theirs, ours in zip(found, expected, strict=True):
            assert_same(theirs, ours)


@pytest.mark.parametrize("strategy", [STAGES["zero 1"], Strategy(zero=2, share_parameters=True)], ids=["1", "shared"])
def test_the_same_where_a_loop_keeps_tensors_of_parameters(ranks, strategy: Strategy) -> None:
    expected, weights = per_sample(None)
    for found, state in ranks(2, per_sample, strategy, True):
        assert_same(state, weights)
        for theirs, ours in zip(found, expected, strict=True):
            assert_same(theirs, ours)


class Forces(nn.Module):
    """The gradient of an energy by where it is taken, as models of molecules answer."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda x: self.energy(x[None]).sum()))(x)


def forced(strategy: Strategy | None) -> dict:
    model = Forces()
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(3):
        x, _ = data(step, 12)
        model(x if strategy is None else shares(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@pytest.mark.parametrize("strategy", [STAGES["zero 0"], STAGES["zero 2"], Strategy(zero=3, accumulation="hold")])
def test_models_may_differentiate_by_torch_func_inside(ranks, strategy) -> None:
    expected = forced(None)
    for state in ranks(2, forced, strategy):
        assert_same(state, expected)


def test_but_not_where_units_are_resharded_in_between(ranks) -> None:
    with pytest.raises(
        RankError, match=r"EngineError: energy.* inside a transform of torch.func.*accumulation to hold"
    ):
        ranks(2, forced, STAGES["zero 3"])
