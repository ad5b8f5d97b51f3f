"""Gradients in low precision are added up in fp32: however many, in whatever order, wherever an element lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import HYBRID, STAGES, WORLDS, in_worlds
from tests.engine.test_precision import low
from tests.quick import diagonal


class Sum(nn.Module):
    """Its gradient is what it is called with, whatever its weights are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def released(model: nn.Module) -> list[float]:
    """Releases a model; the elements of its gradients that this rank held."""
    with torch.no_grad():
        held = [p.grad.as_subclass(torch.Tensor).flatten() for p in model.parameters() if p.grad is not None]
        # None where padding alone is this rank's.
        found = [element for each in held for element in each.tolist()]
    pl.release(model)
    return found


def unit_gradients(strategy: Strategy, count: int) -> list[float]:
    model = pl.parallelize(Sum(96), strategy)
    for _ in pl.accumulate(model, range(count)):
        model(torch.ones(1, 96)).sum().backward()
    return released(model)


def assert_summed(results: list[list[float]], strategy: Strategy, total: int) -> None:
    assert {value for found in results for value in found} == {total}
    replicas = len(results) // strategy.shards(len(results))
    assert sum(map(len, results)) == 96 * replicas, "elements that ranks hold between them"


# bf16 itself stops at 256.
@in_worlds(WORLDS, {"zero 1, N=2", "zero 0, N=3"}, wide=[True, False])
def test_hundreds_of_unit_gradients_sum_to_their_number(ranks, strategy, n, wide) -> None:
    results = ranks(n, unit_gradients, replace(low(strategy, wide=wide), gradients="sum"), 260)
    assert_summed(results, strategy, 260 * n)


def unit_gradients_one_by_one(strategy: Strategy, count: int) -> list[float]:
    """Synchronises every backward, and steps after none."""
    model = pl.parallelize(Sum(96), strategy)
    for _ in range(count):
        model(torch.ones(1, 96)).sum().backward()
    return released(model)


@pytest.mark.parametrize(
    ("strategy", "wide"), diagonal(STAGES, [True, False], quick={("zero 0", "False"), ("zero 3", "True")})
)
def test_backward_passes_that_are_reduced_one_by_one_add_up_in_fp32(ranks, strategy, wide) -> None:
    results = ranks(2, unit_gradients_one_by_one, replace(low(strategy, wide=wide), gradients="sum"), 260)
    assert_summed(results, strategy, 520)


def small_beside_large(strategy: Strategy) -> list[float]:
    world = pl.init()
    model = pl.parallelize(Sum(260), strategy)
    model(torch.full((1, 260), 256.0 if world.rank == 0 else 1.0)).sum().backward()
    found = [
        v for p in model.parameters() if p.grad is not None for v in p.grad.as_subclass(torch.Tensor).flatten().tolist()
    ]
    pl.release(model)
    return found


@pytest.mark.parametrize(("transport", "strategy"), diagonal(["auto", "tcp"], STAGES))
def test_a_sum_does_not_depend_on_where_an_element_lies(ranks, strategy, transport) -> None:
    wide = ranks(4, small_beside_large, replace(low(strategy), gradients="sum"), transport=transport)
    assert {value for found in wide for value in found} == {259.0}
    rounded = replace(low(strategy, wide=False), gradients="sum")
    assert {value for found in ranks(4, small_beside_large, rounded, transport=transport) for value in found} == {260.0}


@pytest.mark.parametrize("strategy", HYBRID.values(), ids=HYBRID)
def test_nor_where_groups_of_ranks_replicate_what_they_shard(ranks, strategy) -> None:
    wide = ranks(4, small_beside_large, replace(low(strategy), gradients="sum"))
    assert {value for found in wide for value in found} == {259.0}
