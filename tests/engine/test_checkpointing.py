"""torch's own activation checkpointing inside a model, reentrant or not, even of a block that runs twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline as pl
from paceline.events import Event
from paceline.schedule import Schedule
from paceline.strategy import Strategy
from tests.engine.models import (
    WORLDS,
    Stack,
    assert_all_same,
    every_world,
    gradients,
    in_worlds,
    loss_on,
    make,
    snapshot,
)


class Checkpointed(Stack):
    """Recomputes its blocks; one parameter is used in two of them."""

    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        if shared:
            self.blocks[2] = self.blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def recomputed(model: nn.Module) -> list[dict]:
    found = []
    for step in range(2):
        model.zero_grad()
        loss_on(model, step).backward()
        found.append(gradients(model))
    return found


def recomputed_in_parallel(strategy: Strategy, reentrant: bool, shared: bool) -> tuple[list[dict], bool]:
    model = pl.parallelize(make(Checkpointed, reentrant, shared), strategy)
    engine = pl.engine_of(model)
    found = recomputed(model)
    executed = [event.target for event in engine.drain_events() if event.stream == "reduce" and event.step == 1]
    as_planned = executed == [op.target for op in engine.schedule.step(1) if op.stream == "reduce"]
    pl.release(model)
    return found, as_planned


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@every_world
def test_checkpointing_of_both_kinds_even_of_a_shared_block(ranks, reentrant, shared, strategy, n) -> None:
    expected = recomputed(make(Checkpointed, reentrant, shared))
    for found, as_planned in ranks(n, recomputed_in_parallel, strategy, reentrant, shared):
        assert_all_same(found, expected)
        assert as_planned, "from the second step on, late units are scheduled after backward"


class MiddleFrozen(Checkpointed):
    """The middle one of its recomputed blocks does not learn."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant, shared=False)
        self.blocks[1].requires_grad_(False)


SIZES = {name: p.numel() for name, p in Stack().named_parameters()}


def trained(model: nn.Module) -> tuple[list[dict], list[dict[str, tuple[int, int]]]]:
    """Gradients and weights of three steps; (dimensions, elements) of parameters after each backward and update."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found, rests = [], []
    for step in range(3):
        optimizer.zero_grad()
        loss_on(model, step).backward()
        rests.append({name: (p.dim(), p.numel()) for name, p in model.named_parameters()})
        found.append(gradients(model))
        optimizer.step()
        rests.append({name: (p.dim(), p.numel()) for name, p in model.named_parameters()})
        found.append(snapshot(model))
    # A backward before the first step leaves shapes, by which optimizers may still be made.
    return found, rests[1:]


def executed_and_planned(events: list[Event], schedule: Schedule, stream: str) -> list[tuple[list, list]]:
    """Kind, target and phase of a stream's ops in the second and the third step, and of those in the schedule."""
    planned = [(op.kind, op.target, op.phase) for op in schedule.step(1) if op.stream == stream]
    return [
        (
            [
                (event.kind, event.target, event.phase)
                for event in events
                if (event.stream, event.step) == (stream, step)
            ],
            planned,
        )
        for step in (1, 2)
    ]


def trained_in_parallel(strategy: Strategy, reentrant: bool) -> tuple[list[dict], list[dict], dict[str, list]]:
    model = pl.parallelize(make(MiddleFrozen, reentrant), strategy)
    engine = pl.engine_of(model)
    found, rests = trained(model)
    events = engine.drain_events()
    streams = {stream: executed_and_planned(events, engine.schedule, stream) for stream in ("gather", "reduce")}
    pl.release(model)
    return found, rests, streams


@pytest.mark.parametrize("reentrant", [False, True])
@every_world
def test_checkpointing_around_a_frozen_block(ranks, reentrant, strategy, n) -> None:
    expected, _ = trained(make(MiddleFrozen, reentrant))
    for found, _, streams in ranks(n, trained_in_parallel, strategy, reentrant):
        assert_all_same(found, expected)
        for stream, steps in streams.items():
            for executed, planned in steps:
                assert executed == planned, stream


GATHERING = {name: world for name, world in WORLDS.items() if world[0].gathers and world[1] > 1}


@pytest.mark.parametrize("reentrant", [False, True])
@in_worlds(GATHERING)
def test_no_parameter_stays_whole_where_a_frozen_block_is_checkpointed(ranks, reentrant, strategy, n) -> None:
    results = ranks(n, trained_in_parallel, strategy, reentrant)
    shards = strategy.shards(n)
    for moment in zip(*(rests for _, rests, _ in results), strict=True):
        assert {dim for rest in moment for dim, _ in rest.values()} == {1}
        for first in range(0, n, shards):
            group = moment[first : first + shards]
            assert {name: sum(rest[name][1] for rest in group) for name in SIZES} == SIZES
    for _, _, streams in results:
        assert all(planned for _, planned in streams["gather"]), "units are gathered in every step"
