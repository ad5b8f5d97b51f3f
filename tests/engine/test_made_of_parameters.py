"""Parameters made of a parallel model's, which are of another class from the first backward on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, loss_on, make, snapshot, stages


def made_after_a_step(strategy: Strategy | None) -> dict[str, torch.Tensor]:
    """What a model ends with that is pulled to what it was, which a parameter made of its own refers to and follows."""
    model = make() if strategy is None else pl.parallelize(make(), strategy)
    optimizer, made = torch.optim.SGD(model.parameters(), lr=0.1), nn.Parameter(model.head.bias.detach().clone())
    for step in range(3):
        (loss_on(model, step) + (model.head.weight - made[:, None]).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        made = nn.Parameter(model.head.bias)
        assert made.is_leaf and torch.equal(made, model.head.bias.detach())
    state = snapshot(model)
    if strategy is not None:
        pl.release(model)
    return state


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_parameter_made_of_one_is_a_parameter(ranks, zero: int) -> None:
    for state in ranks(2, made_after_a_step, STAGES[f"zero {zero}"]):
        assert_same(state, made_after_a_step(None), atol=1e-12)


def parametrized_after_a_step(strategy: Strategy) -> tuple[str, bool]:
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_on(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = model.inner.weight.detach().clone()
    parametrizations.weight_norm(model.head)
    with pytest.raises(pl.EngineError) as caught:
        loss_on(model, 1).backward()
    return str(caught.value), torch.equal(model.inner.weight.detach(), before)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_parametrization_after_parallelize_is_refused_by_name(ranks, zero: int) -> None:
    for message, is_same in ranks(2, parametrized_after_a_step, STAGES[f"zero {zero}"]):
        assert message.startswith("head.") and "after pl.parallelize, so its gradients would not be reduced" in message
        assert is_same


def made_as_the_limits_say(strategy: Strategy) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Copied where parameters are whole, and parametrized once the model is a plain one."""
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_on(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pl.full_parameters(model):
        copied = nn.Parameter(model.head.weight.detach().clone())
        weight = model.head.weight.detach().clone()
    parametrizations.weight_norm(pl.release(model).head)
    del optimizer  # which holds the parameter that this has replaced
    pl.parallelize(model, strategy)
    loss_on(model, 1).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    state = snapshot(model)
    pl.release(model)
    return state, copied.detach(), weight


@stages
def test_what_the_limits_name_instead_is_right(ranks, strategy) -> None:
    alone = make()
    for step in range(2):
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        loss_on(alone, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            parametrizations.weight_norm(alone.head)
    for state, copied, weight in ranks(2, made_as_the_limits_say, strategy):
        assert_same(state, snapshot(alone), atol=1e-12)
        assert torch.equal(copied, weight)
