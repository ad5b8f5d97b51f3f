"""Views of a unit's parameters that leave it by other ways than its answer, at zero 3: their memory is others' next."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import assert_same, loss_on, make, snapshot
from tests.quick import diagonal
from tests.ranks import RankPool

WIDTH = 6
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda weight: weight.t(),
    "row": lambda weight: weight[0],
    "detached": lambda weight: weight.detach(),
    "by data": lambda weight: weight.data,
}


class Block(nn.Module):
    """Leaves a view of its weight on itself, in each forward or in the first; has parameters in a list, as LSTMs do."""

    def __init__(self, keeps: str, view: str) -> None:
        super().__init__()
        self.linear, self.keeps, self.view = nn.Linear(WIDTH, WIDTH), keeps, view
        self.kept: Any = None
        self.flat_weights = list(self.linear.parameters())

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or self.keeps == "each":
            self.kept = VIEWS[self.view](self.flat_weights[0])
        return apply(self.kept, torch.tanh(self.linear(x)))


def apply(view: Tensor, x: Tensor) -> Tensor:
    return x @ view if view.dim() == 2 else x * view


class Reader(nn.Module):
    """Computes with what its blocks have left, once all of them have run."""

    def __init__(self, keeps: str, view: str, checkpoints: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block(keeps, view) for _ in range(4))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        for block in self.blocks:
            x = x + apply(block.kept, x)  # type: ignore[arg-type]
        return self.last(x)


KEPT: list[Any] = []


class Hidden(nn.Linear):
    """Puts a view of its weight where nobody sees it."""

    def __init__(self, view: str, hides: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.view, self.hides = view, hides

    def forward(self, x: Tensor) -> Tensor:
        view = VIEWS[self.view](self.weight)
        if self.hides == "in a list on itself":
            self.kept = [view]
        elif self.hides == "as an array":
            KEPT.append(view.detach().numpy())
        elif self.hides == "in a closure":
            self.answer = lambda: view
        elif self.hides != "nowhere":
            KEPT.append(view)
        # The graph has a view of its own.
        return torch.tanh(x @ self.weight.t()) + apply(view, x)


def hidden(view: str, hides: str) -> tuple[str, bool]:
    """What is said of such a view, and whether weights are what they were."""
    model = make(nn.Sequential, nn.Linear(4, WIDTH), *(Hidden(view, hides) for _ in range(3)), nn.Linear(WIDTH, 2))
    before = snapshot(pl.parallelize(model, Strategy(zero=3)))
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), ""
    try:
        loss_on(model, 0).backward()
        optimizer.step()
    except pl.EngineError as error:
        told = str(error)
    KEPT.clear()
    pl.reset(model)
    after = snapshot(pl.release(model))
    return told, all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("view", "hides"), diagonal(list(VIEWS), ["in a list", "as an array", "in a closure", "in a list on itself"])
)
def test_views_that_are_kept_out_of_sight_are_refused(ranks, view: str, hides: str) -> None:
    for told, stays in ranks(2, hidden, view, hides):
        assert told.startswith("1.weight: 1 has put a view of it") and stays


@pytest.mark.parametrize("view", VIEWS)
def test_views_that_nobody_keeps_are_not(ranks, view: str) -> None:
    assert [told for told, _ in ranks(2, hidden, view, "nowhere")] == ["", ""]


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Weights after three steps, and what an evaluation gives then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_on(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        answer = model(torch.ones(3, 4, dtype=torch.float64))
    return {**snapshot(model), "answer": answer}


def in_parallel(keeps: str, view: str, checkpoints: bool) -> dict[str, Tensor]:
    model = pl.parallelize(make(Reader, keeps, view, checkpoints), Strategy(zero=3))
    found = trained(model)
    pl.release(model)
    return found


@pytest.mark.parametrize(("view", "checkpoints"), diagonal(list(VIEWS), [False, True]))
def test_views_that_outlive_their_unit_have_its_values(ranks, view: str, checkpoints: bool) -> None:
    expected = trained(make(Reader, "each", view, checkpoints))
    for found in ranks(2, in_parallel, "each", view, checkpoints):
        assert_same(found, expected)


def kept_for_good(view: str) -> str:
    with pytest.raises(pl.EngineError) as caught:
        in_parallel("once", view, False)
    return str(caught.value)


@pytest.mark.parametrize("view", VIEWS)
def test_views_that_are_kept_for_the_next_forward_are_refused(ranks, view: str) -> None:
    words = "blocks.0 keeps a view of one of its parameters (blocks.0.linear.weight, blocks.0.linear.bias) as kept"
    assert all(told.startswith(words) for told in ranks(2, kept_for_good, view))


def collections_of_steps() -> list[int]:
    """How often each of some steps lets Python's collector look for what a forward left behind."""
    layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model, counts = pl.parallelize(nn.Sequential(*layers), Strategy(zero=3, units=("*",))), [0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collect = gc.collect

    def counted(generation: int = 2) -> int:
        counts[-1] += 1
        return collect(generation)

    gc.collect = counted
    try:
        for _ in range(4):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with pl.full_parameters(model), torch.no_grad():
                model(torch.ones(2, WIDTH))
            counts.append(0)
    finally:
        gc.collect = collect
    pl.release(model)
    return counts


def test_only_the_first_forward_of_a_unit_is_looked_into(ranks: RankPool) -> None:
    for first, *later in ranks(2, collections_of_steps):
        assert first > 0
        assert not any(later)
