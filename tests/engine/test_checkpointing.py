"""torch's own activation checkpointing inside a model, reentrant or not, even of a block that runs twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline as pl
from paceline.core.events import Event
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from paceline.tensors.sharded_parameter import ShardedParameter
from tests.engine.models import WORLDS, Stack, assert_all_same, gradients, in_worlds, loss_on, make, snapshot


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


@in_worlds(WORLDS, reentrant=[False, True], shared=[False, True])
def test_checkpointing_of_both_kinds_even_of_a_shared_block(ranks, reentrant, shared, strategy, n) -> None:
    expected = recomputed(make(Checkpointed, reentrant, shared))
    for found, as_planned in ranks(n, recomputed_in_parallel, strategy, reentrant, shared):
        assert_all_same(found, expected)
        assert as_planned, "from the second step on, units like these are scheduled after backward"


class MiddleFrozen(Checkpointed):
    """The middle one of its recomputed blocks does not learn."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant, shared=False)
        self.blocks[1].requires_grad_(False)


SIZES = {name: p.numel() for name, p in Stack().named_parameters()}


def held(model: nn.Module) -> dict[str, tuple[bool, int]]:
    """Whether each parameter asks before it is used, and the elements of it that this rank keeps."""
    engine = getattr(model, "_paceline_engine", None)
    if engine is None:
        return {}
    parameters, kept = engine.program.parameters, engine.schedule.kept_buckets
    local = {name: parameters.flat.local.get(parameters.flat.index_of[id(p)]) for name, p in model.named_parameters()}
    return {
        name: (
            # What is gathered once a step stays until the update.
            isinstance(p, ShardedParameter) or parameters.flat.bucket_of.get(parameters.flat.index_of[id(p)]) in kept,
            0 if local[name] is None else local[name].numel(),
        )
        for name, p in model.named_parameters()
    }


def trained(model: nn.Module) -> tuple[list[dict], list[dict[str, tuple[bool, int]]]]:
    """Gradients and weights of three steps; what is `held` of parameters after each backward and update."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found, rests = [], []
    for step in range(3):
        optimizer.zero_grad()
        loss_on(model, step).backward()
        rests.append(held(model))
        found.append(gradients(model))
        optimizer.step()
        rests.append(held(model))
        found.append(snapshot(model))
    return found, rests


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


@in_worlds(WORLDS, reentrant=[False, True])
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
        assert all(asks for rest in moment for asks, _ in rest.values())
        for first in range(0, n, shards):
            group = moment[first : first + shards]
            assert {name: sum(rest[name][1] for rest in group) for name in SIZES} == SIZES
    for _, _, streams in results:
        assert all(planned for _, planned in streams["gather"]), "units are gathered in every step"
