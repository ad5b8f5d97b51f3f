"""Parameters made of a parallel model's: torch refuses the class that these have from the first backward on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, loss_on, make, snapshot, stages

WORDS = (
    "Creating a Parameter from an instance of type ReducedGradParameter requires that detach() returns an instance of "
    "the same type, but return type Tensor was found instead."
)
"""Torch's: no call of a parameter's own tells this one from others before it."""
MAKES: dict[str, Callable[[nn.Module], object]] = {
    "nn.Parameter": lambda model: nn.Parameter(model.head.weight),
    "weight_norm": lambda model: parametrizations.weight_norm(model.head),
}


def made_after_a_step(strategy: Strategy, kind: str) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_on(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model)
    with pytest.raises(RuntimeError) as caught:
        MAKES[kind](model)
    after = snapshot(model)
    loss_on(model, 1).backward()
    optimizer.step()
    pl.release(model)
    return str(caught.value), before, after


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("zero", [1, 2])
def test_a_parameter_made_of_one_raises_in_torchs_words_and_changes_nothing(ranks, zero, kind) -> None:
    for message, before, after in ranks(2, made_after_a_step, STAGES[f"zero {zero}"], kind):
        assert message.startswith(WORDS)
        assert_same(after, before, atol=0)


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
