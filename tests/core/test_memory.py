from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.build_layout import build_layout
from paceline.core.build_schedule import build_schedule
from paceline.core.check import lifetimes
from paceline.core.layout import ROOT, ParameterSpec
from paceline.core.memory import Memory, memory
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from paceline.models.presets import PRESETS
from paceline.models.transformer import Transformer
from paceline.models.units import find_units, parameter_specs
from tests.core.broken import job
from tests.drawn import schedules, spec


def schedule(specs: list[ParameterSpec], strategy: Strategy, world_size: int) -> Schedule:
    units = tuple(dict.fromkeys(item.unit for item in specs))
    return build_schedule(build_layout(specs, units, strategy, world_size), strategy, world_size, 0, units)


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
    assert held == WORKED[zero](padded, ranks), "to the byte, once padding statistics"
    assert held == pytest.approx(WORKED[zero](parameters, ranks), rel=0.03)


TABLE_1 = {
    7.5: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1000: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}
"""Rajbhandari et al. 2020, table 1: GB of a rank by billions of parameters, ranks, and stage 1 to 3."""


@pytest.mark.parametrize("ranks", [1, 4, 16, 64, 256, 1024])
@pytest.mark.parametrize("billions", TABLE_1)
def test_the_table_of_the_zero_paper(billions: float, ranks: int) -> None:
    units = equal_units(10, int(billions * 10**8))
    for zero, printed in zip((1, 2, 3), TABLE_1[billions][ranks], strict=True):
        gigabytes = memory(schedule(units, Strategy(zero=zero, **MIXED), ranks)).states / 1e9
        # It rounds some and cuts others off, after so many digits.
        digit = 10.0 ** -len(printed.partition(".")[2])
        assert abs(gigabytes - float(printed)) <= digit, (zero, gigabytes)


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


def test_a_slot_is_as_large_as_the_largest_that_comes_into_it_and_kept_buckets_stay() -> None:
    sizes = {"u0": 4, "u1": 3, "u2": 7, "u3": 5}
    specs = [spec("tied", NUMEL, ROOT), *(spec(f"{unit}.w", size * NUMEL, unit) for unit, size in sizes.items())]
    held = memory(schedule(specs, Strategy(zero=3), 4))
    assert held.gathered == (7 + 5) * BYTES + BYTES, "u0 and u2 share a slot, u1 and u3 the other"
    # Backward fills slots from the end, and the kept unit's gradients come last.
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


@given(schedules(), st.integers(1, 3))
def test_nothing_is_held_beyond_the_whole_model(plan: Schedule, micro_batches: int) -> None:
    held = memory(plan, micro_batches)
    assert held.total == held.parameters + held.gradients + held.optimizer + held.buckets + held.gathered
    assert min(held.parameters, held.gradients, held.optimizer, held.buckets, held.gathered) >= 0
    whole = sum(flat.numel * flat.itemsize for flat in plan.layout.flats)
    frozen = sum(flat.numel * flat.itemsize for flat in plan.layout.flats if not flat.trainable)
    largest = max((bucket.bytes for bucket in plan.layout.buckets), default=0)
    # What ranks share is what they update together: frozen parameters each rank keeps for itself.
    own = 0 if plan.shards_parameters else frozen if plan.shares_memory else whole
    assert held.parameters == own + (whole - own) // plan.shards
    assert (largest <= held.gathered <= whole) if plan.shards_parameters else held.gathered == 0
    gradients = sum(flat.numel * flat.gradient_itemsize for flat in plan.layout.flats if flat.trainable)
    assert held.buckets <= gradients * plan.reuses_gradient_slots
    if not plan.reuses_gradient_slots:
        assert held.gradients >= gradients


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_reduced_as_computed_are_widened_from_their_reduction_to_the_update(zero: int) -> None:
    strategy = Strategy(zero=zero, precision="bfloat16", reduce_in_float32=False)  # type: ignore[arg-type]
    plan = job(strategy, numel=1024)[0]
    (wide,) = (buffer for buffer in plan.buffers(1) if buffer.transient)
    assert (wide.kind, wide.dtype, wide.bytes) == ("widened", "float32", 4 * 5 * 1024 // plan.shards)
    life = lifetimes(plan.step(1))[wide.name]
    assert [plan.step(1)[at].kind for at in (life.written, life.read) if at is not None] == ["widen", "update"]
    # What is summed over micro-batches is as wide as the update already.
    assert not [buffer for buffer in plan.buffers(2) if buffer.transient]
    assert "widen" not in [op.kind for op in plan.step(2)]
    # It is gone when the next step's activations are there.
    assert memory(plan).gradients + memory(plan).buckets <= 2 * 5 * 1024 * (2 if zero else 1)
