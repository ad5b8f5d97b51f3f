"""What looks odd but is right comes out right: gradients taken by hand, closures, a unit's own parameter."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import (
    STAGES,
    Stack,
    assert_all_same,
    assert_same,
    data,
    every_way,
    every_world,
    gradients,
    in_parallel,
    make,
    rows,
    shares,
    snapshot,
    train,
)
from tests.quick import full


def penalised(model: nn.Module) -> list[dict]:
    found = []
    for step in range(2):
        model.zero_grad()
        x, y = rows(model, step)
        x.requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (F.mse_loss(output, y) + slope.square().mean()).backward()
        found.append(gradients(model))
    return found


@every_world
def test_a_gradient_penalty_beside_the_loss_is_reduced(ranks, strategy, n) -> None:
    if strategy.gathers:
        # The graph of the gradients uses parameters that would have been resharded.
        strategy = replace(strategy, accumulation="hold")
    for found in ranks(n, in_parallel, strategy, Stack, penalised):
        assert_all_same(found, penalised(make()))


def refused_penalty() -> str:
    model = pl.parallelize(make(), STAGES["zero 3"])
    x = shares(data(0, 8)[0]).requires_grad_()
    with pytest.raises(EngineError) as caught:
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    pl.reset(model)
    pl.release(model)
    return str(caught.value)


def test_a_graph_of_gradients_through_resharded_parameters_is_refused(ranks) -> None:
    assert all("accumulation to hold" in message for message in ranks(2, refused_penalty))


def grad_on_one_rank() -> tuple[dict, int]:
    world = pl.init()
    model = pl.parallelize(make(), Strategy(bucket_mb=1e-4))
    x, y = (shares(part) for part in data(0, 8))
    if world.rank == 0:
        inputs = x.clone().requires_grad_()
        torch.autograd.grad(model(inputs).sum(), inputs)
    F.mse_loss(model(x), y).backward()
    step = pl.engine_of(model).state.step
    found = gradients(model)
    pl.release(model)
    return found, step


def test_autograd_grad_communicates_nothing(ranks) -> None:
    model = make()
    x, y = data(0, 8)
    F.mse_loss(model(x), y).backward()
    for result, step in ranks(2, grad_on_one_rank):
        assert_same(result, gradients(model))
        assert step == 0


def with_closure(strategy: Strategy) -> dict:
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = (shares(part) for part in data(step, 8))

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    state = snapshot(model)
    pl.release(model)
    return state


@every_way
def test_a_step_with_a_closure_equals_one_without(ranks, strategy) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = data(step, 8)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    for state in ranks(2, with_closure, strategy):
        assert_same(state, snapshot(model))


def with_closure_under_no_sync(strategy: Strategy) -> str:
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> None:
        with model.no_sync():
            F.mse_loss(model(x), y).backward()

    x, y = map(shares, data(0, 8))
    with pytest.raises(pl.EngineError) as raised:
        optimizer.step(closure)
    pl.reset(model)
    pl.release(model)
    return str(raised.value)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_closure_that_reduces_nothing_is_refused(ranks, zero) -> None:
    for told in ranks(2, with_closure_under_no_sync, Strategy(zero=zero)):
        assert told.startswith("optimizer.step() with a closure after a backward under no_sync")


class Query(nn.Module):
    """Returns its own parameter, as learned queries do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4))

    def forward(self) -> torch.Tensor:
        return self.table


class WithQuery(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.query = Query()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.query())


@every_world
def test_a_unit_may_return_its_own_parameter(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, WithQuery, train):
        assert_all_same(found, train(make(WithQuery)))


def zeroed_between(how: str) -> dict:
    model = pl.parallelize(make(), Strategy(bucket_mb=1e-4))
    (x0, y0), (x1, y1), (x2, y2) = ([shares(part) for part in data(seed, 8)] for seed in (0, 1, 2))
    F.mse_loss(model(x0), y0).backward()
    if how == "alias":
        for p in model.parameters():
            p.grad = p.grad.detach()
        F.mse_loss(model(x2), y2).backward()
    else:
        with model.no_sync():
            F.mse_loss(model(x1), y1).backward()
        model.zero_grad(set_to_none=how == "none")
        F.mse_loss(model(x2), y2).backward()
    found = gradients(model)
    pl.release(model)
    return found


@pytest.mark.parametrize("how", ["none", "zero", "alias"])
def test_what_was_zeroed_stays_gone_and_an_alias_counts_once(ranks, how) -> None:
    model = make()
    for seed in (0, 2) if how == "alias" else (2,):
        x, y = data(seed, 8)
        F.mse_loss(model(x), y).backward()
    for result in ranks(2, zeroed_between, how):
        assert_same(result, gradients(model))


class Waves(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum, self.linear = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).to(torch.complex128) @ self.spectrum).abs()


def clipped(strategy: Strategy | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: nn.Module = Waves().double()
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = dict[str, Tensor]()
    for step in range(2):
        model(torch.full((2, 4), 1.0 + step, dtype=torch.float64)).square().mean().backward()
        clip = nn.utils.clip_grad_norm_ if strategy is None else pl.clip_grad_norm_
        norm = clip(model.parameters() if strategy is None else model, 0.5)  # type: ignore[operator]
        assert not norm.is_complex()
        if strategy is not None:
            again = pl.engine_of(model).grad_norm()
            assert again.dtype == norm.dtype
        found[f"norm {step}"] = norm
        optimizer.step()
        optimizer.zero_grad()
    found |= {name: value.clone() for name, value in model.state_dict().items()}
    if strategy is not None:
        pl.release(model)
    return found


@pytest.mark.parametrize("zero", [full(0), full(1), full(2), 3])
def test_complex_gradients_are_clipped_by_their_norm(ranks, zero: int) -> None:
    for found in ranks(2, clipped, Strategy(zero=zero, bucket_mb=1e-4)):
        assert_same(found, clipped(None))


def test_a_process_group_that_is_there_already_is_named(ranks) -> None:
    for told in ranks(2, joined_twice):
        assert "leave out dist.init_process_group" in told


def joined_twice() -> str:
    world = pl.init()
    with patch("paceline.comm.world._world", None), pytest.raises(pl.UserError) as refused:
        pl.init()
    assert pl.init() == world
    return str(refused.value)
