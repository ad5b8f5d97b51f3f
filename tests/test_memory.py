from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import paceline as pl
from paceline.engine.parallel import engine_of
from paceline.engine.units import find_units, parameter_specs
from paceline.errors import UserError
from paceline.layout import ROOT, ParameterSpec, build_layout
from paceline.memory import Memory, memory
from paceline.models.presets import PRESETS
from paceline.models.transformer import Transformer
from paceline.schedule import Schedule
from paceline.strategy import Strategy
from tests.drawn import schedules, spec
from tests.engine.models import several_ranks


def schedule(specs: list[ParameterSpec], strategy: Strategy, world_size: int) -> Schedule:
    units = tuple(dict.fromkeys(item.unit for item in specs))
    return Schedule(build_layout(specs, units, strategy, world_size), strategy, world_size, 0, units)


def equal_units(count: int, numel: int, dtype: str = "float32") -> list[ParameterSpec]:
    return [spec(f"u{i}.w", numel, f"u{i}", dtype) for i in range(count)]


@pytest.fixture(scope="module")
def gpt2() -> list[ParameterSpec]:
    with torch.device("meta"):
        model = Transformer(PRESETS["gpt2-124m"])
    return parameter_specs(model, list(find_units(model)))


MIXED = {"precision": "bfloat16", "reduce_in_float32": False}
"""Parameters, gradients: 2 bytes each; master, momentum, variance: 4 each."""

WORKED = {
    0: lambda p, n: 16 * p,
    1: lambda p, n: 4 * p + 12 * p / n,
    2: lambda p, n: 2 * p + 14 * p / n,
    3: lambda p, n: 16 * p / n,
}
"""Model states with P parameters on N ranks: Rajbhandari et al. 2020, figure 1."""


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_model_states_of_mixed_precision_adam_are_those_of_the_zero_paper(zero: int, ranks: int, gpt2) -> None:
    plan = schedule(gpt2, Strategy(zero=zero, **MIXED), ranks)
    parameters = sum(item.numel for item in gpt2)
    assert parameters == 124_439_808
    held = memory(plan).states
    padded = parameters + plan.layout.padding_bytes // 2
    assert held == WORKED[zero](padded, ranks), "to the byte, once padding counts"
    assert held == pytest.approx(WORKED[zero](parameters, ranks), rel=0.03)


def test_a_model_of_100_billion_parameters_takes_1600_gigabytes() -> None:
    plan = schedule(equal_units(100, 10**9), Strategy(**MIXED), 8)
    assert memory(plan).states == pytest.approx(1.6e12, rel=1e-6)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 840), (1, 350), (2, 227.5), (3, 105)])
def test_70_billion_parameters_on_8_ranks_without_an_fp32_master(zero: int, gigabytes: float) -> None:
    # A bfloat16 model left as it is, with the optimizer's two states in fp32.
    plan = schedule(equal_units(70, 10**9, "bfloat16"), Strategy(zero=zero), 8)
    assert memory(plan, states=2, state_itemsize=4).states == pytest.approx(gigabytes * 1e9, rel=1e-6)


@pytest.mark.parametrize(("zero", "more"), [(0, 2), (1, 2), (2, 2 / 8), (3, 2 / 8)])
def test_gradients_reduced_in_fp32_take_two_bytes_more_where_they_live(zero: int, more: float) -> None:
    specs = equal_units(10, 8 * 64)
    narrow = memory(schedule(specs, Strategy(zero=zero, **MIXED), 8))
    wide = memory(schedule(specs, Strategy(zero=zero, precision="bfloat16"), 8))
    assert wide.gradients - narrow.gradients == more * 10 * 8 * 64
    assert (wide.parameters, wide.optimizer) == (narrow.parameters, narrow.optimizer)


NUMEL, BYTES = 4 * 64, 4 * 64 * 4
"""Elements and fp32 bytes of one of five equal units, in four shards without padding."""


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "expected"),
    [
        (Strategy(), 1, Memory(5 * BYTES, 5 * BYTES, 10 * BYTES, 0, 0)),
        (Strategy(), 9, Memory(5 * BYTES, 5 * BYTES, 10 * BYTES, 0, 0)),
        (Strategy(accumulation="each"), 9, Memory(5 * BYTES, 10 * BYTES, 10 * BYTES, 0, 0)),
        (Strategy(zero=1), 9, Memory(5 * BYTES, 5 * BYTES, 10 * BYTES // 4, 0, 0)),
        (Strategy(zero=1, accumulation="each"), 9, Memory(5 * BYTES, 5 * BYTES * 5 // 4, 10 * BYTES // 4, 0, 0)),
        (Strategy(zero=2, bucket_mb=1e-5), 9, Memory(5 * BYTES, 5 * BYTES // 4, 10 * BYTES // 4, 2 * BYTES, 0)),
        (Strategy(zero=2), 1, Memory(5 * BYTES, 5 * BYTES // 4, 10 * BYTES // 4, 5 * BYTES, 0)),
        (Strategy(zero=2, accumulation="defer"), 9, Memory(5 * BYTES, 5 * BYTES, 10 * BYTES // 4, 0, 0)),
        (Strategy(zero=3), 1, Memory(5 * BYTES // 4, 5 * BYTES // 4, 10 * BYTES // 4, 2 * BYTES, 2 * BYTES)),
        (
            Strategy(zero=3, accumulation="hold"),
            9,
            Memory(5 * BYTES // 4, 5 * BYTES // 4, 10 * BYTES // 4, 2 * BYTES, 5 * BYTES),
        ),
        (
            Strategy(zero=3, shard=2),
            1,
            Memory(5 * BYTES // 2, 5 * BYTES // 2, 10 * BYTES // 2, 2 * BYTES, 2 * BYTES),
        ),
        (Strategy(zero=1, shard=2), 1, Memory(5 * BYTES, 5 * BYTES * 3 // 2, 10 * BYTES // 2, 0, 0)),
        (
            Strategy(zero=1, share_parameters=True),
            1,
            Memory(5 * BYTES // 4, 5 * BYTES, 10 * BYTES // 4, 0, 0),
        ),
    ],
)
def test_five_equal_units_on_four_ranks(strategy: Strategy, micro_batches: int, expected: Memory) -> None:
    plan = schedule(equal_units(5, NUMEL), strategy, 4)
    assert plan.layout.padding_bytes == 0
    assert memory(plan, micro_batches) == expected


def test_sums_over_micro_batches_are_as_wide_as_the_master() -> None:
    plan = schedule(equal_units(5, 2 * NUMEL), Strategy(zero=2, **MIXED), 4)
    assert memory(plan, 1).gradients == 5 * 2 * NUMEL // 4 * 2
    assert memory(plan, 2).gradients == 5 * 2 * NUMEL // 4 * 4


def test_a_place_is_as_large_as_the_largest_that_comes_into_it_and_residents_stay() -> None:
    sizes = {"u0": 4, "u1": 3, "u2": 7, "u3": 5}
    specs = [spec("tied", NUMEL, ROOT), *(spec(f"{unit}.w", size * NUMEL, unit) for unit, size in sizes.items())]
    held = memory(schedule(specs, Strategy(zero=3), 4))
    assert held.gathered == (7 + 5) * BYTES + BYTES, "u0 and u2 share a place, u1 and u3 the other"
    # Backward fills places from the end, and the resident unit's gradients come last.
    assert held.buckets == (5 + 7) * BYTES


def test_frozen_parameters_have_neither_gradients_nor_states_nor_a_master() -> None:
    specs = [spec("base", 4 * NUMEL, "u0", trainable=False), spec("adapter", 2 * NUMEL, "u0")]
    for zero, share in ((1, 1), (3, 4)):
        held = memory(schedule(specs, Strategy(zero=zero, **MIXED), 4))
        assert held.parameters == 6 * NUMEL * 2 // share
        assert held.optimizer == 2 * NUMEL * 12 // 4
        assert held.gradients == 2 * NUMEL * 2 // share


@pytest.mark.parametrize(("states", "times"), [(0, 0), (1, 1), (2, 2)])
def test_an_optimizer_of_so_many_states(states: int, times: int) -> None:
    assert memory(schedule(equal_units(5, NUMEL), Strategy(), 2), states=states).optimizer == times * 5 * BYTES


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
    weights, gradients, rotates = engine.running.weights, engine.running.gradients, engine.schedule.rotates
    whole = storage_bytes(gradients._whole.values()) if gradients is not None else 0
    assert gradients is None or not gradients._published
    masters = [master for master in weights._masters if master is not None]
    held = Memory(
        # One copy between the ranks of a group takes each of them its part.
        parameters=storage_bytes(weights._flats) // (engine.schedule.shards if engine.schedule.shares else 1),
        gradients=(storage_bytes(gradients._sums.values()) if gradients is not None else 0) + (0 if rotates else whole),
        optimizer=storage_bytes(masters)
        + sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim()),
        buckets=whole if rotates else 0,
        gathered=storage_bytes(weights.gathered.whole.values()),
    )
    predicted = memory(engine.schedule, micro_batches)
    # An optimizer has no states, two numbers in fp32, for the padding that this rank's share has at its end.
    pieces = [weights.piece(index) for index in range(len(weights.parameters))]
    updated = sum((p if piece is None else piece).numel() for p, piece in zip(weights.parameters, pieces, strict=True))
    padding = sum(flat.numel for flat in engine.layout.flats) // engine.schedule.shards - updated
    held = replace(held, optimizer=held.optimizer + 2 * 4 * padding)
    pl.release(model)
    return predicted, held


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


PRECISIONS: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "bfloat16"},
    {"precision": "bfloat16", "reduce_in_float32": False},
    {"precision": "float16"},
    {"precision": "float16", "reduce_in_float32": False},
)
POLICIES = ("auto", "each", "defer", "hold")


def all_predicted_and_held(strategy: Strategy) -> dict[str, tuple[Memory, Memory]]:
    """In every precision, with one micro-batch a step and with several under each policy that there is."""
    found = {}
    # Both low precisions take as much; where policies are invalid for a strategy it says so.
    every = [*itertools.product(PRECISIONS[:3], POLICIES), *((precision, "auto") for precision in PRECISIONS[3:])]
    for precision, policy in every:
        with contextlib.suppress(UserError):
            chosen = replace(strategy, bucket_mb=0.01, accumulation=policy, **precision)
            for micro_batches in (1, 3) if policy == "auto" else (3,):
                found[f"{chosen}, {micro_batches} micro-batches"] = predicted_and_held(chosen, micro_batches)
    return found


@several_ranks
def test_a_rank_holds_what_is_predicted_to_the_byte(ranks, strategy: Strategy, n: int) -> None:
    for result in ranks(n, all_predicted_and_held, strategy, timeout=120):
        assert len(result) >= 2 * len(PRECISIONS)
        for case, (predicted, held) in result.items():
            assert held == predicted, case


@given(schedules(), st.integers(1, 3))
def test_nothing_is_held_beyond_the_whole_model(plan: Schedule, micro_batches: int) -> None:
    held = memory(plan, micro_batches)
    assert held.total == held.parameters + held.gradients + held.optimizer + held.buckets + held.gathered
    assert min(held.parameters, held.gradients, held.optimizer, held.buckets, held.gathered) >= 0
    whole = sum(flat.numel * flat.itemsize for flat in plan.layout.flats)
    largest = max((bucket.bytes for bucket in plan.layout.buckets), default=0)
    assert held.parameters * (plan.shards if plan.gathers_units or plan.shares else 1) == whole
    assert (largest <= held.gathered <= whole) if plan.gathers_units else held.gathered == 0
    gradients = sum(flat.numel * flat.gradient_itemsize for flat in plan.layout.flats if flat.trainable)
    assert held.buckets <= gradients * plan.rotates
    if not plan.rotates:
        assert held.gradients >= gradients
