"""What ranks hold, beside what `memory` says of their schedules."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.errors import UserError
from paceline.core.memory import Memory, memory
from paceline.core.strategy import Strategy
from paceline.engine.api import engine_of
from paceline.measuring.alive import AliveBytes
from paceline.tensors.state_shard import plain_state
from tests.engine.models import NEAREST_GROUPS, SEVERAL, in_worlds
from tests.tensors.whole_owner import plain_view


def predicted_and_held(strategy: Strategy, micro_batches: int) -> tuple[Memory, Memory]:
    """What `memory` says of a small model, and what this rank's engine and optimizer hold after two steps."""
    torch.manual_seed(0)
    model = pl.parallelize(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        for x in pl.accumulate(model, [torch.randn(2, 64)] * micro_batches):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    # The next step begins, for which what the last one's update was given must be gone.
    model(torch.randn(2, 64))
    program = engine.program
    kinds = {
        kind: storage_bytes(tensor for name, tensor in program._tensors.by_name.items() if name.startswith(kind))
        for kind in ("parameters", "master", "unsharded", "gradients", "gradient slot", "reduced")
    }
    stay = not kinds["parameters"]
    if stay:
        # They are where they were, as no other rank reaches them.
        kinds["parameters"] = storage_bytes(program.parameters.all)
    places = {tensor.untyped_storage().data_ptr() for tensor in program._tensors.by_name.values()}
    places |= {view.untyped_storage().data_ptr() for view in program.parameters.flat.views}
    for parameter in program.parameters.all:
        # What is not there to compute with takes one element.
        shown = plain_view(parameter).untyped_storage()
        assert shown.data_ptr() in places or shown.nbytes() <= 8
    held = Memory(
        # What the ranks of a group share takes each of them its part.
        parameters=kinds["parameters"] // (engine.schedule.shards if engine.schedule.shares_memory else 1),
        gradients=kinds["gradients"] + kinds["reduced"],
        optimizer=kinds["master"]
        + sum(plain_state(t).nbytes for state in optimizer.state.values() for t in state.values() if t.dim()),
        buckets=kinds["gradient slot"],
        gathered=kinds["unsharded"],
    )
    predicted = memory(engine.schedule, micro_batches)
    # An optimizer has no states, two numbers in fp32, for the padding that this rank's share has at its end.
    parameters = program.parameters
    locals_ = [parameters.flat.local.get(index) for index in range(len(parameters.all))]
    updated = sum((p if own is None else own).numel() for p, own in zip(parameters.all, locals_, strict=True))
    padding = sum(flat.numel for flat in engine.layout.flats) // engine.schedule.shards - updated
    # Nor is there any for it in parameters that stay where they were.
    held = replace(held, optimizer=held.optimizer + 2 * 4 * padding, parameters=held.parameters + 4 * padding * stay)
    pl.release(model)
    return predicted, held


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# Both low precisions take as much: policies are looked at in one of them.
PRECISIONS: dict[str, list[dict[str, Any]]] = {
    "float32": [{}],
    "low": [{"precision": "bfloat16"}, {"precision": "float16"}],
    "low, reduced in it": [
        {"precision": "bfloat16", "reduce_in_float32": False},
        {"precision": "float16", "reduce_in_float32": False},
    ],
}
POLICIES = ("auto", "each", "defer", "hold")


def all_predicted_and_held(strategy: Strategy, precisions: list[dict[str, Any]]) -> dict[str, tuple[Memory, Memory]]:
    """In some precisions, with one micro-batch a step and with several under each policy that there is."""
    found = {}
    # Where policies are invalid for a strategy it says so.
    every = [*itertools.product(precisions[:1], POLICIES), *((precision, "auto") for precision in precisions[1:])]
    for precision, policy in every:
        with contextlib.suppress(UserError):
            chosen = replace(strategy, bucket_mb=0.01, accumulation=policy, **precision)
            for micro_batches in (1, 3) if policy == "auto" else (3,):
                found[f"{chosen}, {micro_batches} micro-batches"] = predicted_and_held(chosen, micro_batches)
    return found


@in_worlds(SEVERAL, NEAREST_GROUPS, precisions=PRECISIONS)
def test_a_rank_holds_what_is_predicted_to_the_byte(
    ranks, strategy: Strategy, n: int, precisions: list[dict[str, Any]]
) -> None:
    for result in ranks(n, all_predicted_and_held, strategy, precisions):
        assert len(result) >= 2 * len(precisions)
        for case, (predicted, held) in result.items():
            assert held == predicted, case


def held_by_states(strategy: Strategy) -> tuple[int, int, int]:
    """Bytes that rank 0's state takes at most beside the engine, of the parameters, and of the largest bucket."""
    model = pl.parallelize(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), strategy)
    model(torch.randn(2, 64)).square().mean().backward()
    with AliveBytes() as alive:
        pl.full_state_dict(model)
    layout = engine_of(model).layout
    pl.release(model)
    sizes = [bucket.numel * 4 for bucket in layout.buckets]
    return alive.peak, sum(sizes), max(sizes)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_state_of_a_sharded_model_is_whole_on_rank_0_alone(ranks, precision: str) -> None:
    (whole, size, _), (part, _, largest) = ranks(2, held_by_states, Strategy(zero=3, precision=precision))
    assert 0.9 * size < whole <= size + 2 * largest
    # One that was gathered is there while the next one is made room for.
    assert 0 < part <= 2 * largest
