"""What must not pass in silence raises, and what looks odd but is right comes out right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.comm.transport import CommunicationError
from paceline.engine.progress import EngineError
from paceline.strategy import Strategy
from tests.engine.models import (
    STAGES,
    Stack,
    assert_same,
    data,
    every_way,
    fail_in_backward,
    gradients,
    make,
    shares,
    snapshot,
    stages,
)


def unseen_backward(strategy: Strategy, kind: str) -> str:
    model = pl.parallelize(make(nn.Linear, 4, 2), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = shares(data(0, 8)[0]).requires_grad_()
    if kind == "penalty":
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    else:
        model.weight.square().sum().backward()
    with pytest.raises(EngineError) as caught:
        optimizer.step()
    pl.release(model)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["penalty", "weights only"])
@stages
def test_a_step_on_a_backward_that_no_hook_saw_is_an_error(ranks, strategy, kind) -> None:
    if strategy.stage and kind == "weights only":
        pytest.skip("a piece of a parameter outside its model: autograd refuses its shape")
    for message in ranks(2, unseen_backward, strategy, kind):
        assert "a backward that paceline did not see" in message
        assert "Compute the loss from what model(...) returns" in message


def penalised(strategy: Strategy) -> dict:
    model = pl.parallelize(make(), strategy)
    x, y = (shares(part) for part in data(0, 8))
    x.requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    (F.mse_loss(output, y) + slope.square().mean()).backward()
    found = gradients(model)
    pl.release(model)
    return found


def refused_penalty() -> str:
    model = pl.parallelize(make(), STAGES["zero 3"])
    x = shares(data(0, 8)[0]).requires_grad_()
    with pytest.raises(EngineError) as caught:
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    pl.reset(model)
    pl.release(model)
    return str(caught.value)


def test_a_graph_of_gradients_through_parameters_that_were_let_go_is_refused(ranks) -> None:
    assert all("accumulation to hold" in message for message in ranks(2, refused_penalty))


@pytest.mark.parametrize(
    "strategy", [STAGES["zero 0"], STAGES["zero 1"], STAGES["zero 2"], Strategy(zero=3, accumulation="hold")]
)
def test_a_gradient_penalty_beside_the_loss_is_reduced(ranks, strategy) -> None:
    expected = make()
    for rank in (0, 1):
        x, y = (part[rank::2] for part in data(0, 8))
        x.requires_grad_()
        output = expected(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        ((F.mse_loss(output, y) + slope.square().mean()) / 2).backward()
    for result in ranks(2, penalised, strategy):
        assert_same(result, gradients(expected))


def grad_on_one_rank() -> tuple[dict, int]:
    world = pl.init()
    model = pl.parallelize(make(), Strategy(bucket_mb=1e-4))
    x, y = (shares(part) for part in data(0, 8))
    if world.rank == 0:
        inputs = x.clone().requires_grad_()
        torch.autograd.grad(model(inputs).sum(), inputs)
    F.mse_loss(model(x), y).backward()
    step = pl.engine_of(model).progress.step
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


def learned_query(strategy: Strategy) -> dict:
    model = pl.parallelize(make(WithQuery), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = (shares(part) for part in data(step, 8))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    pl.release(model)
    return state


@stages
def test_a_unit_may_return_its_own_parameter(ranks, strategy) -> None:
    model = make(WithQuery)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = data(step, 8)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in ranks(2, learned_query, strategy):
        assert_same(state, snapshot(model))


def changed_after(strategy: Strategy, kind: str) -> str:
    model = make()
    model.inner.requires_grad_(False)
    pl.parallelize(model, strategy)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    if kind == "unfrozen":
        model.inner.requires_grad_(True)
    elif kind == "replaced":
        model.head = nn.Linear(6, 2).double()
    elif kind == "reshaped":
        # Adding broadcasts it, and so would copying its gradient.
        model.head.bias.data = torch.zeros(1, dtype=torch.float64)
    else:
        model.load_state_dict(snapshot(model), assign=True)
    with pytest.raises(EngineError) as caught:
        F.mse_loss(model(x), y).backward()
    pl.release(model)
    return str(caught.value)


@stages
@pytest.mark.parametrize("kind", ["unfrozen", "replaced", "assigned", "reshaped"])
def test_parameters_that_change_after_parallelize_are_an_error(ranks, strategy, kind) -> None:
    words = "was edited" if kind == "reshaped" and strategy.zero else "after pl.parallelize"
    assert all(words in message for message in ranks(2, changed_after, strategy, kind))


def released(strategy: Strategy) -> dict:
    model = pl.parallelize(make(), strategy)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    pl.release(model)
    model.zero_grad()
    F.mse_loss(model(x), y).backward()  # this rank's own again
    own = gradients(model)
    model.zero_grad()
    pl.parallelize(model, strategy)
    F.mse_loss(model(x), y).backward()
    reduced = gradients(model)
    pl.release(model)
    return {"own": own, "reduced": reduced}


@stages
def test_a_released_model_is_a_plain_one_and_can_be_made_parallel_again(ranks, strategy) -> None:
    model = make()
    x, y = data(0, 8)
    F.mse_loss(model(x), y).backward()
    for rank, result in enumerate(ranks(2, released, strategy)):
        assert_same(result["reduced"], gradients(model))
        alone = make()
        F.mse_loss(alone(x[rank::2]), y[rank::2]).backward()
        assert_same(result["own"], gradients(alone))


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


def different_strategies() -> str:
    world = pl.init()
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(make(), Strategy(gradients="mean" if world.rank else "sum"))
    return str(caught.value)


def test_ranks_with_different_strategies_are_told_so(ranks) -> None:
    assert all("ranks use different strategies" in message for message in ranks(2, different_strategies))


class FailsAt(Stack):
    """Raises in backward behind one of its blocks."""

    where: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for index, block in enumerate(self.blocks):
            x = x + block(x)
            if index == self.where:
                x.register_hook(fail_in_backward)
        return self.head(x)


def fail_at_different_places(strategy: Strategy) -> dict:
    world = pl.init()
    model = pl.parallelize(make(FailsAt, 6, 4), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = (shares(part) for part in data(step, 8))
        if step == 1:
            model.where = 0 if world.rank else 2
            # Where whole gradients are few, the other rank's backward cannot go on alone.
            with pytest.raises((ValueError, pl.CommunicationError), match=r"middle|gone"):
                F.mse_loss(model(x), y).backward()
            model.where = None
            pl.reset(model)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    pl.release(model)
    return state


@every_way
def test_ranks_that_failed_in_different_places_go_on_after_reset(ranks, strategy) -> None:
    model = make(FailsAt, 6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = data(step, 8)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in ranks(2, fail_at_different_places, strategy):
        assert_same(state, snapshot(model))


def calls_something_else() -> str:
    world = pl.init()
    model = pl.parallelize(make())
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    transport = pl.engine_of(model).running.synchronizer.transports["reduce"]
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
    assert first.endswith("; bucket 0 holds head.weight to inner.bias")
