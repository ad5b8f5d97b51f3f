"""Ranks that do not run the same units, or run them in another order each."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.comm.transport import CommunicationError
from paceline.core.strategy import Strategy
from tests.engine.models import (
    SEVERAL,
    STAGES,
    WORLDS,
    Stack,
    assert_same,
    data,
    in_worlds,
    loss_on,
    make,
    snapshot,
    train,
)

STEPS = 4


def as_ranks(model: nn.Module, n: int, play: Callable[[int, int], None]) -> dict:
    """Weights after `train` by `n` ranks, whose parts one process plays in turn: `play(step, rank)` sets the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for rank in range(n):
            play(step, rank)
            x, y = (part[rank::n] for part in data(step, 12))
            (F.mse_loss(model(x), y) / n).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


# ---- not the same units


class Sometimes(Stack):
    """Skips a block on some ranks."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for index, block in enumerate(self.blocks):
            if not (self.skips and index == 1):
                x = x + block(x)
        return self.head(x)


def skipped(strategy: Strategy, on_one: bool) -> dict:
    world = pl.init()
    model = pl.parallelize(make(Sometimes, 6, 5), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        model.skips = (step % world.world_size == world.rank) == on_one
        loss_on(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    pl.release(model)
    return state


@in_worlds(WORLDS, on_one={"one alone runs": False, "one skips": True})
def test_a_block_that_only_some_ranks_use_counts_zero_for_the_others_and_hangs_nobody(
    ranks, strategy, n, on_one
) -> None:
    model = make(Sometimes, 6, 5)
    expected = as_ranks(model, n, lambda step, rank: setattr(model, "skips", (step % n == rank) == on_one))
    for state in ranks(n, skipped, strategy, on_one):
        assert_same(state, expected)


# ---- not the same order

ORDERS = ((0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2))
"""Of the blocks, by rank."""


class OwnOrder(Stack):
    """Runs its blocks in an order that can be set."""

    order = ORDERS[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for index in self.order:
            x = x + self.blocks[index](x)
        return self.head(x)


def in_own_order(strategy: Strategy, since: int = 0) -> dict | str:
    """Every rank in another order, from a step on."""
    model = make(OwnOrder)
    if not since:
        model.order = ORDERS[pl.init().rank]
    pl.parallelize(model, strategy)
    try:
        if since:
            train(model, since)
            model.order = ORDERS[pl.init().rank]
        return train(model, STEPS)[0]
    except CommunicationError as error:
        return str(error)


ANY_ORDER = {name: (strategy, n) for name, (strategy, n) in SEVERAL.items() if not strategy.gathers}
ONE_ORDER = {name: (strategy, n) for name, (strategy, n) in SEVERAL.items() if strategy.gathers}


@in_worlds(ANY_ORDER)
def test_ranks_that_run_units_in_another_order_each_equal_one_process(ranks, strategy, n) -> None:
    model = make(OwnOrder)
    expected = as_ranks(model, n, lambda step, rank: setattr(model, "order", ORDERS[rank]))
    for state in ranks(n, in_own_order, strategy):
        assert_same(state, expected)


@pytest.mark.parametrize("since", [0, 2])
@in_worlds(ONE_ORDER)
def test_where_all_gather_a_unit_to_compute_with_it_another_order_is_an_error_that_names_it(
    ranks, strategy, n, since
) -> None:
    began = time.monotonic()
    results = ranks(n, in_own_order, strategy, since, timeout=60)
    assert time.monotonic() - began < 40, "nobody waits until the limit for a rank that gave up elsewhere"
    assert all(isinstance(message, str) for message in results), results
    assert any("ranks disagree" in message and "blocks." in message for message in results), results


def two_in_one_graph(strategy: Strategy | None) -> dict[str, Tensor]:
    """Each rank runs the two models in another order, so that autograd begins with the one or the other."""
    models = [make(), make(lambda: Stack(blocks=1))]
    rank = 0
    if strategy is not None:
        rank = pl.init().rank
        for model in models:
            pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    for step in range(3):
        losses = [loss_on(model, step) for model in (models if rank == 0 else models[::-1])]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {
        f"{number} {name}": value for number, model in enumerate(models) for name, value in snapshot(model).items()
    }
    for model in models if strategy is not None else ():
        pl.release(model)
    return found


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_two_models_in_one_graph_that_each_rank_runs_in_another_order(ranks, zero) -> None:
    expected = two_in_one_graph(None)
    for found in ranks(2, two_in_one_graph, STAGES[f"zero {zero}"], timeout=20):
        assert_same(found, expected)
