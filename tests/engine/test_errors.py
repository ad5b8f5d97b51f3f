"""Misuse is an error that says what to do, and after an exception training goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.engine.progress import EngineError
from paceline.strategy import Strategy
from tests.engine.models import (
    Stack,
    assert_same,
    data,
    fail_in_backward,
    make,
    shares,
    snapshot,
    stages,
)
from tests.ranks import RankError


def step_between(strategy: Strategy) -> str:
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    loss = F.mse_loss(model(x), y)
    optimizer.step()
    with pytest.raises(EngineError) as caught:
        loss.backward()
    pl.reset(model)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    pl.release(model)
    return str(caught.value)


@stages
@pytest.mark.parametrize("n", [1, 2])
def test_an_optimizer_step_between_forward_and_backward_is_an_error_that_says_what_to_do(ranks, strategy, n) -> None:
    for message in ranks(n, step_between, strategy):
        assert "stepped between this forward and its backward" in message
        assert "call backward before optimizer.step()" in message


def unsynchronised_step(strategy: Strategy) -> str:
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (shares(part) for part in data(0, 8))
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    with pytest.raises(EngineError) as caught:
        optimizer.step()
    pl.release(model)
    return str(caught.value)


@stages
def test_a_step_on_gradients_that_were_never_reduced_is_an_error(ranks, strategy) -> None:
    assert all("replicas would drift apart" in message for message in ranks(2, unsynchronised_step, strategy))


class Fragile(Stack):
    """Raises in the middle of backward when told to."""

    fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for index, block in enumerate(self.blocks):
            x = x + block(x)
            if index == 0 and self.fail:
                x.register_hook(fail_in_backward)
        return self.head(x)


def fail_and_go_on(strategy: Strategy, where: str) -> dict:
    model = pl.parallelize(make(Fragile), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x, y = (shares(part) for part in data(step, 8))
        if step == 2:
            model.fail = where == "backward"
            with pytest.raises(ValueError, match="middle"):
                for half in pl.accumulate(model, [slice(0, 2), slice(2, 4)]):
                    loss = F.mse_loss(model(x[half]), y[half])
                    if where == "loop":
                        raise ValueError("in the middle of the loop")
                    loss.backward()
            model.fail = False
            if where == "backward":
                with pytest.raises(EngineError, match=r"call pl\.reset"):
                    model(x)
            pl.reset(model)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    pl.release(model)
    return state


@stages
@pytest.mark.parametrize("where", ["backward", "loop"])
def test_after_an_exception_and_reset_the_next_step_equals_a_clean_run(ranks, strategy, where) -> None:
    model = make(Fragile)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x, y = data(step, 8)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in ranks(2, fail_and_go_on, strategy, where):
        assert_same(state, snapshot(model))


def different_models() -> str:
    world = pl.init()
    model = Stack(width=6 if world.rank != 1 else 8)
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(model)
    return str(caught.value)


def test_ranks_that_built_different_models_are_named_with_the_parameter(ranks) -> None:
    for message in ranks(3, different_models):
        assert 'rank 0, 2: ["inner.weight", [6, 4]' in message
        assert 'rank 1: ["inner.weight", [8, 4]' in message


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


def sparse_gradients() -> None:
    model = pl.parallelize(Sparse())
    model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused_by_name(ranks) -> None:
    with pytest.raises(RankError, match=r"table\.weight has a sparse gradient.*sparse=False"):
        ranks(2, sparse_gradients)
