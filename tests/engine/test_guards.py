"""What must not pass in silence raises: changes beside the engine, and ranks that differ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.comm.transport import CommunicationError
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import (
    SHARDED,
    STAGES,
    assert_all_same,
    assert_same,
    data,
    in_parallel,
    loss_on,
    make,
    rows_of,
    sharded,
    shares,
    snapshot,
    stages,
)
from tests.quick import diagonal


def without_outputs(model: nn.Module, kind: str) -> list[dict]:
    """Two steps whose losses are not computed from what the model returns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = rows_of(model, data(0, 8)[0]).requires_grad_()
    for _ in range(2):
        if kind == "penalty":
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            slope.square().mean().backward()
        else:
            model(x)
            model.weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [snapshot(model)]


@pytest.mark.parametrize(("strategy", "kind"), diagonal(STAGES, ["penalty", "weights only"]))
def test_losses_that_are_not_computed_from_what_the_model_returns(ranks, strategy, kind) -> None:
    for found in ranks(2, in_parallel, strategy, partial(make, nn.Linear, 4, 2), without_outputs, kind):
        assert_all_same(found, without_outputs(make(nn.Linear, 4, 2), kind))


def given_by_hand(strategy: Strategy, steps_before: int, factor: float) -> tuple[str, dict, dict]:
    """What a step on `p.grad` that the loop has made comes to: its error, and weights before and after."""
    model = pl.parallelize(make(nn.Linear, 4, 2), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps_before):
        loss_on(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    before, message = snapshot(model), ""
    model.bias.grad = torch.ones(2, dtype=torch.float64) * (1 + factor * pl.init().rank)
    try:
        optimizer.step()
        optimizer.zero_grad()
    except EngineError as error:
        message = str(error)
        pl.reset(model)
    after = snapshot(model)
    if not message:
        loss_on(model, 9).backward()
        optimizer.step()
    pl.release(model)
    return message, before, after


@pytest.mark.parametrize("steps_before", [0, 1])
@stages
def test_a_step_on_gradients_that_nothing_reduced_is_an_error(ranks, strategy, steps_before) -> None:
    for message, before, after in ranks(2, given_by_hand, strategy, steps_before, 1.0):
        assert_same(after, before, atol=0)
        assert "bias has a gradient of a backward that paceline did not see" in message
        assert "Compute the loss from what model(...) returns" in message


@pytest.mark.parametrize("steps_before", [0, 1])
@stages
def test_gradients_that_every_rank_puts_there_alike_are_stepped_on(ranks, strategy, steps_before) -> None:
    for message, before, after in ranks(2, given_by_hand, strategy, steps_before, 0.0):
        assert not message
        assert_same(after, {"weight": before["weight"], "bias": before["bias"] - 0.1})


def changed_after(strategy: Strategy, kind: str) -> str:
    model = make()
    model.inner.requires_grad_(False)
    pl.parallelize(model, strategy)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    with pytest.raises(EngineError) as caught:
        change(model, kind)
        F.mse_loss(model(x), y).backward()
    pl.release(model)
    return str(caught.value)


def change(model: nn.Module, kind: str) -> None:
    if kind == "unfrozen":
        model.inner.requires_grad_(True)
    elif kind == "unfrozen and wrapped":
        model.inner.requires_grad_(True)
        model.head = nn.Sequential(model.head)
    elif kind == "replaced":
        model.head = nn.Linear(6, 2).double()
    elif kind == "added module":
        model.loss = nn.MSELoss()  # holds no parameters, so it may be added
        model.adapter = nn.Linear(6, 6).double()
    elif kind == "added parameter":
        model.head.scale = nn.Parameter(torch.ones(2).double())
    elif kind == "reshaped":
        # Adding broadcasts it, and so would copying its gradient.
        model.head.bias.data = torch.zeros(1, dtype=torch.float64)
    else:
        torch.__future__.set_swap_module_params_on_conversion(kind == "swapped")
        try:
            model.load_state_dict(snapshot(model), assign=kind == "assigned")
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


KINDS = [
    "unfrozen",
    "unfrozen and wrapped",
    "replaced",
    "added module",
    "added parameter",
    "assigned",
    "reshaped",
    "swapped",
]


@pytest.mark.parametrize(("strategy", "kind"), diagonal(STAGES, KINDS))
def test_parameters_that_change_after_parallelize_are_an_error(ranks, strategy, kind) -> None:
    words = "head.bias changed its shape from (2,) to (1,) after" if kind == "reshaped" else "after pl.parallelize"
    assert all(words in message for message in ranks(2, changed_after, strategy, kind))


def reshaped_inside(strategy: Strategy) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A bias that is given one element for all, with no backward in between; weights before and after."""
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    with pytest.raises(EngineError) as caught, pl.full_parameters(model):
        change(model, "reshaped")
    pl.reset(model)
    optimizer.step()
    after = snapshot(model)
    pl.release(model)
    return str(caught.value), before, after


@sharded
def test_another_shape_inside_full_parameters_is_an_error(ranks, strategy) -> None:
    for message, before, after in ranks(2, reshaped_inside, strategy):
        assert "head.bias changed its shape from (2,) to (1,) after pl.parallelize: call pl.release" in message
        assert_same(after, before, atol=0)


def swapped_by_hand(strategy: Strategy) -> tuple[dict[str, torch.Tensor], str]:
    """A loop that swaps a parameter's content between two steps, and what is said if that is not done."""
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = ""
    for step in range(2):
        x, y = (shares(part) for part in data(step, 8))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            if step == 0:
                swap_head(model)
        except (RuntimeError, EngineError) as error:
            told = str(error)
    state = snapshot(model)
    pl.release(model)
    return state, told


def swap_head(model: nn.Module) -> None:
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.full_like(model.head.weight, 0.25)))


def alone(swaps: bool) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = data(step, 8)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if swaps and step == 0:
            swap_head(model)
    return snapshot(model)


@pytest.mark.parametrize("strategy", STAGES.values(), ids=STAGES)
def test_a_parameter_that_is_swapped_by_hand_counts_or_stays_as_it_was(ranks, strategy) -> None:
    for state, told in ranks(2, swapped_by_hand, strategy):
        assert bool(told) == (strategy.zero > 0)
        assert_same(state, alone(swaps=not told), atol=1e-12)


def stepped_inside(strategy: Strategy) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before and after an optimizer's step that was refused inside `full_parameters`, and its message."""
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = snapshot(model)
    loss_on(model, 0).backward()
    with pytest.raises(EngineError) as caught, pl.full_parameters(model):
        optimizer.step()
    pl.reset(model)
    return str(caught.value), before, snapshot(model)


@pytest.mark.parametrize(
    "strategy",
    [*SHARDED.values(), replace(SHARDED["zero 1"], share_parameters=True), Strategy(zero=0, precision="bfloat16")],
    ids=[*SHARDED, "shared parameters", "zero 0 in bfloat16"],
)
def test_a_step_inside_full_parameters_is_an_error_and_changes_nothing(ranks, strategy) -> None:
    for message, before, after in ranks(2, stepped_inside, strategy):
        assert "optimizer.step() inside pl.full_parameters" in message
        assert_same(after, before, atol=0)


def converted(strategy: Strategy) -> str:
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    with pytest.raises(EngineError) as caught:
        model.float()
        optimizer.step()
    if strategy.zero < 3:
        # What the message says works.
        assert all(p.dtype == torch.float64 for p in pl.release(model).parameters())
        assert_same(snapshot(model), snapshot(make()), atol=1e-6)
    return str(caught.value)


@sharded
def test_a_model_that_is_converted_after_parallelize_is_an_error(ranks, strategy) -> None:
    words = "outside of forward and backward" if strategy.zero == 3 else "is float32 since pl.parallelize"
    assert all(words in message for message in ranks(2, converted, strategy))


def different_strategies() -> str:
    world = pl.init()
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(make(), Strategy(gradients="mean" if world.rank else "sum"))
    return str(caught.value)


def test_ranks_with_different_strategies_are_told_so(ranks) -> None:
    assert all("ranks use different strategies" in message for message in ranks(2, different_strategies))


def calls_something_else() -> str:
    world = pl.init()
    model = pl.parallelize(make())
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    transport = pl.engine_of(model).program.collectives.transports["reduce"]
    buffer = transport.allocate(1, torch.float32)
    try:
        if world.rank == 1:
            transport.run("barrier", buffer, "a stray")
        else:
            F.mse_loss(model(x), y).backward()
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_ranks_that_communicate_different_things_are_told_which_parameters_it_is_about(ranks) -> None:
    first, stray = ranks(2, calls_something_else)
    for message in (first, stray):
        assert "ranks disagree" in message
        assert "barrier a stray 1 float32" in message and "all_reduce bucket 0 " in message
    assert "; bucket 0 holds head.weight to inner.bias. A backward pass needs it: every rank must" in first
