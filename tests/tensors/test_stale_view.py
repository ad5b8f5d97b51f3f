"""Views of parameters with a graph, taken before `pl.parallelize` or inside `pl.full_parameters`, and used after."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import SYSTEMS, Strategy
from tests.engine.models import assert_same, snapshot
from tests.quick import full as only_in_full

VIEWS = {
    "transposed": (lambda weight: weight.t(), lambda view: view),
    "flat": (lambda weight: weight.view(-1), lambda view: view.view(8, 6).t()),
    "rows": (lambda weight: weight[2:6], lambda view: F.pad(view, (0, 0, 2, 2)).t()),
    "a view of a view": (lambda weight: weight[1:].t(), lambda view: F.pad(view, (1, 0))),
}


class Tied(nn.Module):
    """An autoencoder whose decoder has a view of the encoder's weight, taken once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(6, 6)  # so that the next is not the first of its buffer
        self.encoder = nn.Linear(6, 8)
        self.kept: list[Tensor] = []

    def take(self, view: str) -> None:
        self.kept, self.shape = [VIEWS[view][0](self.encoder.weight)], VIEWS[view][1]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(self.before(x))), self.shape(self.kept[0]))


def trained(strategy: Strategy | None, view: str, inside: bool = False) -> dict[str, Tensor]:
    dtype = torch.float32 if strategy is not None and strategy.low else torch.float64
    model, rows = Tied().to(dtype), slice(None)
    if not inside:
        model.take(view)
    if strategy is not None:
        rank = pl.init().rank
        rows, model = slice(3 * rank, 3 * rank + 3), pl.parallelize(model, strategy)
    if inside:
        with pl.full_parameters(model) if strategy is not None else contextlib.nullcontext():
            model.take(view)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        x = torch.randn(6, 6, dtype=dtype, generator=torch.Generator().manual_seed(step))[rows]
        F.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


PLACES: dict[str, Any] = {
    "zero 1": Strategy(zero=1),
    "zero 2": Strategy(zero=2),
    "shared parameters": Strategy(zero=2, share_parameters=True),
    "parameter server": SYSTEMS["parameter server"],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("view", ["transposed", *(only_in_full(view) for view in VIEWS if view != "transposed")])
def test_views_of_before_follow_their_parameter(ranks, place: str, view: str) -> None:
    expected = trained(None, view)
    for found in ranks(2, trained, PLACES[place], view):
        assert_same(found, expected, atol=1e-12)


def told_of(strategy: Strategy, inside: bool) -> str:
    with pytest.raises(EngineError) as caught:
        trained(strategy, "transposed", inside)
    return str(caught.value)


@pytest.mark.parametrize("accumulation", ["auto", only_in_full("hold")])
def test_where_the_parameter_is_gathered_anew_its_views_are_refused(ranks, accumulation: Any) -> None:
    for told in ranks(2, told_of, Strategy(zero=3, accumulation=accumulation), True):
        assert told.startswith("encoder.weight: a view of it that was taken inside pl.full_parameters, with a graph")


@pytest.mark.parametrize("zero", [0, only_in_full(1), only_in_full(2)])
def test_views_in_another_precision_are_refused(ranks, zero: int) -> None:
    for told in ranks(2, told_of, Strategy(zero=zero, precision="bfloat16"), False):
        assert told.startswith("encoder.weight: a view of it that was taken before pl.parallelize, with a graph")


def left_over(strategy: Strategy) -> tuple[str, str]:
    """What a view says of itself, and what reading it raises, that a loop has left in a variable."""
    model = pl.parallelize(Tied().double(), strategy)
    with pl.full_parameters(model):
        rows = [parameter[0] for parameter in model.parameters()]
        values = [parameter.detach()[0] for parameter in model.parameters()]
    assert all(value.isfinite().all() for value in values)
    with pytest.raises(EngineError) as caught:
        rows[0].sum()
    return f"{rows[0]} {tuple(rows[0].shape)}", str(caught.value)


def test_a_view_that_is_left_over_tells_what_it_is(ranks) -> None:
    for shown, told in ranks(2, left_over, Strategy(zero=3)):
        assert shown == "view of before.weight as it was inside pl.full_parameters (6,)"
        assert "Take the view in forward" in told
