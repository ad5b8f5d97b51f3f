"""Buffers that forwards change: each rank's own until the next forward, and then rank 0's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import paceline as pl
from tests.quick import full


class Counting(nn.Module):
    """Adds what it is given to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x.detach().sum(0)
        return self.inner(x) + self.seen.to(x.dtype)


def stepped(zero: int, given: float | None = None) -> nn.Module:
    """A model after a step in which rank r has added r + 1, or `given`."""
    rank = pl.init().rank
    torch.manual_seed(0)
    model = pl.parallelize(Counting(), pl.Strategy(zero=zero))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.full((1, 2), rank + 1.0)
    if given is not None and rank:
        x.fill_(given)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return model


def asked(zero: int, how: str) -> tuple[list[float], list[float]]:
    """What the buffer holds before and after the model has been asked for."""
    model = stepped(zero)
    before = model.seen.tolist()
    with torch.no_grad():
        if how == "forward":
            model(torch.zeros(1, 2))
        elif how == "inference":
            with torch.inference_mode():
                model(torch.zeros(1, 2))
        elif how == "state_dict":
            assert torch.equal(model.state_dict()["seen"], torch.ones(2))
        elif how == "copy":
            assert torch.equal(copy.deepcopy(model).seen, torch.ones(2))
        elif how == "full_parameters":
            with pl.full_parameters(model):
                pass
        elif how == "broadcast_buffers":
            pl.broadcast_buffers(model)
    pl.release(model)
    return before, model.seen.tolist()


HOWS = ("forward", "inference", "state_dict", "copy", "full_parameters", "broadcast_buffers", "release")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("zero", [0, full(1), 3])
def test_a_ranks_own_stay_until_the_model_is_asked_for(ranks, zero: int, how: str) -> None:
    assert ranks(2, asked, zero, how) == [([1, 1], [1, 1]), ([2, 2], [1, 1])]


def alone(zero: int) -> list[float]:
    """Rank 0 evaluates, and the others do not."""
    model = stepped(zero)
    answer = torch.zeros(2)
    if pl.init().rank == 0:
        with torch.no_grad():
            answer = model(torch.zeros(1, 2))[0] - model.inner.bias
    pl.release(model)
    return answer.tolist()


@pytest.mark.parametrize("zero", [0, 2])
def test_a_rank_evaluates_alone(ranks, zero: int) -> None:
    assert ranks(2, alone, zero) == [pytest.approx([1, 1]), [0, 0]]


def written() -> list[float]:
    """The loop sets back what a rank has counted, after the step."""
    model = stepped(0)
    model.seen.zero_()
    model(torch.zeros(1, 2))
    pl.release(model)
    return model.seen.tolist()


def test_what_the_loop_writes_after_the_step_stays(ranks) -> None:
    assert ranks(2, written) == [[0, 0], [0, 0]]


def spoilt() -> list[float]:
    model = stepped(0, float("nan"))
    model(torch.zeros(1, 2))
    pl.release(model)
    return model.seen.tolist()


def test_what_is_not_a_number_on_a_rank_is_rank_0s_too(ranks) -> None:
    assert ranks(2, spoilt) == [[1, 1], [1, 1]]


def evaluated_in_between(evaluates: bool) -> list[float]:
    """Two graphs over BatchNorm, and an evaluation between their backward passes."""
    rank = pl.init().rank
    torch.manual_seed(0)
    model = pl.parallelize(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(10 * step + rank))
        first, second = (model(each).square().sum() for each in x)
        first.backward()
        model.eval()
        if evaluates:
            with torch.no_grad():
                model(x[0])
        model.train()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights: list[float] = model.state_dict()["0.weight"].flatten().tolist()
    pl.release(model)
    return weights


def test_graphs_that_keep_statistics_run_backward_after_others_have_arrived(ranks) -> None:
    mine, theirs = ranks(2, evaluated_in_between, True)
    assert mine == theirs == ranks(2, evaluated_in_between, False)[0]
