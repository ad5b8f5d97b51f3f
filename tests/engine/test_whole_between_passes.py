"""Parameters that are read, copied or edited whole between a forward and its backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import Stack, assert_all_same, every_world, loss_on, make, snapshot, stages


def states(model: nn.Module) -> None:
    model.state_dict()


def copies(model: nn.Module) -> None:
    copy.deepcopy(model)


def looks(model: nn.Module) -> None:
    with pl.full_parameters(model):
        sum(parameter.detach().sum() for parameter in model.parameters())


def edits(model: nn.Module) -> None:
    with pl.full_parameters(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def trained(model: nn.Module, between: Callable[[nn.Module], None] | None) -> list[dict]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = loss_on(model, step)
        if between is not None:
            between(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [snapshot(model)]


def in_parallel(strategy: Strategy, between: Callable[[nn.Module], None]) -> list[dict]:
    model = pl.parallelize(make(Stack), strategy)
    found = trained(model, between)
    pl.release(model)
    return found


@pytest.mark.parametrize("between", [states, copies])
@every_world
def test_reading_leaves_the_backward_right(ranks, strategy, n, between) -> None:
    for found in ranks(n, in_parallel, strategy, between):
        assert_all_same(found, trained(make(Stack), None))


def refused(strategy: Strategy, between: Callable[[nn.Module], None]) -> str:
    """What a backward says, after which training goes on."""
    model = pl.parallelize(make(Stack), strategy)
    loss = loss_on(model, 0)
    between(model)
    before = snapshot(model)
    with pytest.raises((EngineError, RuntimeError)) as caught:
        loss.backward()
    del loss
    pl.reset(model)
    assert_all_same([snapshot(model)], [before])
    trained(model, None)
    pl.release(model)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("between", [looks, edits])
def test_where_sharded_parameters_may_have_been_edited_the_backward_is_refused(ranks, between) -> None:
    for said in ranks(2, refused, Strategy(zero=3, bucket_mb=1e-4), between):
        assert said.startswith("EngineError: pl.full_parameters was entered"), said


@stages
def test_a_backward_through_edited_weights_is_refused_at_every_stage(ranks, strategy) -> None:
    for said in ranks(2, refused, strategy, edits):
        assert "pl.full_parameters was entered" in said or "modified by an inplace operation" in said, said


def scripted(strategy: Strategy) -> str:
    model = make(Stack)
    model.blocks[1] = torch.jit.script(model.blocks[1])
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(model, strategy)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_torchscript_is_refused_by_name(ranks) -> None:
    for said in ranks(1, scripted, Strategy()):
        assert "blocks.1 is TorchScript" in said
