"""Several forwards or backwards before a step, a loss on some outputs, evaluation in between: at every stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.strategy import Strategy
from tests.engine.models import (
    Stack,
    assert_same,
    data,
    every_way,
    gradients,
    make,
    shares,
    stages,
)


def two_backwards(strategy: Strategy, set_to_none: bool) -> dict:
    model = pl.parallelize(make(), strategy)
    for seed in (0, 1):
        x, y = (shares(part) for part in data(seed, 8))
        F.mse_loss(model(x), y).backward()
    first = gradients(model)
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=set_to_none)
    x, y = (shares(part) for part in data(2, 8))
    F.mse_loss(model(x), y).backward()
    second = gradients(model)
    pl.release(model)
    return {"first": first, "second": second}


@pytest.mark.parametrize("set_to_none", [True, False])
@every_way
def test_two_backwards_before_a_step_both_count(ranks, strategy, set_to_none) -> None:
    model = make()
    for seed in (0, 1):
        x, y = data(seed, 8)
        F.mse_loss(model(x), y).backward()
    expected = gradients(model)
    model.zero_grad()
    x, y = data(2, 8)
    F.mse_loss(model(x), y).backward()
    second = gradients(model)
    for rank, result in enumerate(ranks(2, two_backwards, strategy, set_to_none)):
        if rank == 0 or strategy.collective == "all_reduce":
            assert_same(result["first"], expected)
            assert_same(result["second"], second)


def two_forwards(strategy: Strategy, both: bool) -> dict:
    model = pl.parallelize(make(), strategy)
    for step in range(2):
        (x0, y0), (x1, y1) = ([shares(part) for part in data(2 * step + i, 8)] for i in (0, 1))
        model.zero_grad()
        first, second = model(x0), model(x1)
        loss = F.mse_loss(second, y1)
        (F.mse_loss(first, y0) + loss if both else loss).backward()
    found = gradients(model)
    pl.release(model)
    return found


@stages
@pytest.mark.parametrize("both", [True, False])
def test_two_forwards_then_one_backward(ranks, strategy, both) -> None:
    model = make()
    (x0, y0), (x1, y1) = data(2, 8), data(3, 8)
    loss = F.mse_loss(model(x1), y1)
    (F.mse_loss(model(x0), y0) + loss if both else loss).backward()
    for result in ranks(2, two_forwards, strategy, both):
        assert_same(result, gradients(model))


class TwoHeads(Stack):
    """Returns a mapping of two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return {"a": self.head(x), "b": self.other(x)}


def one_output(strategy: Strategy, which: tuple[str, ...]) -> list[dict]:
    world = pl.init()
    model = pl.parallelize(make(TwoHeads), strategy)
    found = []
    for step in range(3):
        x, y = (shares(part) for part in data(step, 8))
        model.zero_grad()
        F.mse_loss(model(x)[which[world.rank]], y).backward()
        found.append(gradients(model))
    pl.release(model)
    return found


@stages
@pytest.mark.parametrize("which", [("a", "a"), ("a", "b")])
def test_a_loss_on_some_outputs_completes_and_unused_parameters_keep_no_gradient(ranks, strategy, which) -> None:
    results = ranks(2, one_output, strategy, which)
    for step in range(3):
        expected = make(TwoHeads)
        x, y = data(step, 8)
        for rank, name in enumerate(which):
            (F.mse_loss(expected(x[rank::2])[name], y[rank::2]) / 2).backward()
        for found in results:
            assert_same(found[step], gradients(expected))


def evaluated_between(strategy: Strategy, grad: bool) -> dict:
    model = pl.parallelize(make(), strategy)
    for step in range(2):
        model.zero_grad()
        x, y = (shares(part) for part in data(step, 8))
        loss = F.mse_loss(model(x), y)
        model.eval()
        with torch.set_grad_enabled(grad):
            model(data(9, 3)[0])
        model.train()
        loss.backward()
    found = gradients(model)
    pl.release(model)
    return found


@stages
@pytest.mark.parametrize("grad", [False, True])
def test_an_evaluation_between_forward_and_backward_changes_nothing(ranks, strategy, grad) -> None:
    model = make()
    x, y = data(1, 8)
    F.mse_loss(model(x), y).backward()
    for result in ranks(2, evaluated_between, strategy, grad):
        assert_same(result, gradients(model))
