"""Schedules of four units, op by op."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from paceline.layout import Layout, build_layout
from paceline.ops import COUNTS, PREVIOUS, Key
from paceline.placement import DEPTH
from paceline.schedule import Schedule
from paceline.strategy import SYSTEMS, Strategy
from tests.drawn import spec

UNITS = tuple(f"u{i}" for i in range(4))
SIZE = 1024 * 4
"""Bytes of each of these units."""


def layout(strategy: Strategy, world_size: int, units: tuple[str, ...] = UNITS) -> Layout:
    return build_layout([spec(f"{unit}.w", 1024, unit) for unit in units], units, strategy, world_size)


def schedule(strategy: Strategy, world_size: int, rank: int = 0, units: tuple[str, ...] = UNITS, **more) -> Schedule:
    return Schedule(layout(strategy, world_size, units), strategy, world_size, rank, units, **more)


def words(ops) -> list[str]:
    return [f"{op.kind} {op.target}" for op in ops]


ONE_BUCKET_EACH = Strategy(bucket_mb=SIZE / 2**20)


# ---- the list as it reads


def test_overlapped_buckets_are_reduced_between_the_backwards_they_wait_for() -> None:
    assert words(schedule(ONE_BUCKET_EACH, 2).step(1)) == [
        *(f"forward u{i}" for i in range(4)),
        *("backward u3", "collect u3", "all_reduce bucket 0"),
        *("backward u2", "collect u2", "all_reduce bucket 1"),
        *("backward u1", "collect u1", "all_reduce bucket 2"),
        *("backward u0", "collect u0", "all_reduce bucket 3"),
        *("measure counts", "all_reduce counts", "update optimizer"),
    ]


def test_stage_1_scatters_gradients_and_gathers_what_the_update_made_of_the_parameters() -> None:
    ops = words(schedule(replace(ONE_BUCKET_EACH, zero=1), 2).step(1))
    assert [word for word in ops if "bucket" in word] == [
        *(f"reduce_scatter bucket {i}" for i in range(4)),
        *(f"all_gather bucket {i}" for i in (3, 2, 1, 0)),
    ]
    assert ops.index("update optimizer") < ops.index("all_gather bucket 3"), "the first units are needed first"


def test_stage_3_gathers_one_unit_ahead_and_keeps_the_last_two_at_the_turn() -> None:
    units = tuple(f"u{i}" for i in range(5))
    ops = words(schedule(Strategy(zero=3), 2, units=units).step(1))
    assert ops == [
        *("all_gather u0", "all_gather u1", "forward u0"),
        *("all_gather u2", "forward u1"),
        *("all_gather u3", "forward u2"),
        *("all_gather u4", "forward u3"),
        *("forward u4", "backward u4", "collect u4", "reduce_scatter u4"),
        *("all_gather u2", "backward u3", "collect u3", "reduce_scatter u3"),
        *("all_gather u1", "backward u2", "collect u2", "reduce_scatter u2"),
        *("all_gather u0", "backward u1", "collect u1", "reduce_scatter u1"),
        *("backward u0", "collect u0", "reduce_scatter u0"),
        *("measure counts", "all_reduce counts", "update optimizer"),
    ]


def test_after_backward_every_unit_is_collected_last() -> None:
    ops = schedule(replace(ONE_BUCKET_EACH, synchronize="after"), 2).step(1)
    assert [op.kind for op in ops if op.kind in ("backward", "collect")] == ["backward"] * 4 + ["collect"] * 4
    assert sum(op.stream == "reduce" for op in ops) == 4


def test_late_units_and_units_that_do_not_run_are_collected_after_the_whole_backward() -> None:
    late = words(schedule(ONE_BUCKET_EACH, 2, late=frozenset({"u3"})).step(1))
    assert late.index("collect u2") < late.index("backward u0") < late.index("collect u3")
    absent = words(Schedule(layout(ONE_BUCKET_EACH, 2), ONE_BUCKET_EACH, 2, 0, UNITS[1:]).step(1))
    assert "backward u0" not in absent
    assert absent.index("backward u1") < absent.index("collect u0") < absent.index("all_reduce bucket 3")


def test_what_never_runs_is_gathered_once_as_others_may_read_it() -> None:
    plan = Schedule(layout(Strategy(zero=3), 2), Strategy(zero=3), 2, 0, UNITS[1:])
    ops = plan.step(3)
    assert [op.micro_batch for op in ops if (op.kind, op.target) == ("all_gather", "u0")] == [0]
    assert "u0" not in plan.place


def test_a_frozen_unit_is_gathered_but_neither_collected_nor_reduced() -> None:
    specs = [spec(f"{unit}.w", 1024, unit, trainable=unit != "u2") for unit in UNITS]
    plan = Schedule(build_layout(specs, UNITS, Strategy(zero=3), 2), Strategy(zero=3), 2, 0, UNITS)
    assert {op.kind for op in plan.step(2) if op.target.startswith("u2")} == {"forward", "backward", "all_gather"}


@pytest.mark.parametrize("strategy", [*SYSTEMS.values(), *(Strategy(zero=zero) for zero in (1, 2, 3))])
def test_one_rank_communicates_nothing(strategy: Strategy) -> None:
    assert {op.kind for op in schedule(strategy, 1).step(2)} == {"forward", "backward", "update"}


def test_low_precision_collects_on_one_rank_too_because_gradients_change_their_dtype() -> None:
    kinds = Counter(op.kind for op in schedule(Strategy(precision="bfloat16"), 1).step(2))
    assert kinds == {"forward": 8, "backward": 8, "collect": 8, "update": 1}


@pytest.mark.parametrize(
    ("strategy", "micro_batches"),
    [
        (Strategy(), {3}),
        (Strategy(zero=1), {3}),
        (Strategy(zero=1, accumulation="each"), {0, 1, 2, 3}),
        (Strategy(zero=2), {0, 1, 2, 3}),
        (Strategy(zero=2, accumulation="defer"), {3}),
        (Strategy(zero=3, accumulation="hold"), {0, 1, 2, 3}),
        (Strategy(zero=3, accumulation="defer"), {3}),
    ],
)
def test_which_micro_batches_reduce(strategy: Strategy, micro_batches: set[int]) -> None:
    ops = schedule(strategy, 2).step(4)
    assert {op.micro_batch for op in ops if op.stream == "reduce"} == micro_batches
    assert [op.micro_batch for op in ops if op.target == COUNTS and op.kind == "all_reduce"] == [3]


def test_hold_gathers_in_the_first_forward_and_never_again() -> None:
    ops = schedule(Strategy(zero=3, accumulation="hold"), 2).step(3)
    gathers = [op for op in ops if op.kind == "all_gather"]
    assert [(op.target, op.micro_batch, op.phase) for op in gathers] == [(unit, 0, "forward") for unit in UNITS]


@pytest.mark.parametrize(
    ("strategy", "kind"), [(Strategy(zero=1), "all_gather"), (SYSTEMS["parameter server"], "broadcast")]
)
def test_the_next_step_waits_for_what_the_update_sent(strategy: Strategy, kind: str) -> None:
    forward, *_ = schedule(strategy, 2).step(2)
    assert forward.after == (Key(kind, "bucket 0", PREVIOUS, "update"),)


def test_ranks_of_a_group_shard_and_the_groups_are_summed_where_gradients_are_complete() -> None:
    strategy = Strategy(zero=2, shard=2)
    ops = schedule(strategy, 6, rank=3).step(2)
    assert Counter((op.kind, op.stream, op.micro_batch) for op in ops if op.target == "bucket 0") == {
        ("reduce_scatter", "reduce", 0): 1,
        ("reduce_scatter", "reduce", 1): 1,
        ("all_reduce", "replicate", 1): 1,
        ("all_gather", "gather", 1): 1,
    }


def test_replicas_sum_what_was_summed_over_micro_batches_in_the_dtype_that_is_updated() -> None:
    strategy = Strategy(zero=2, shard=2, precision="bfloat16", reduce_in_float32=False)
    for micro_batches, itemsize in ((1, 2), (2, 4)):
        (op,) = [op for op in schedule(strategy, 4).step(micro_batches) if op.stream == "replicate"]
        assert op.bytes == 4 * 1024 // 2 * itemsize


def test_buckets_whose_units_run_between_each_other_have_a_place_each() -> None:
    units = tuple(f"u{i}" for i in range(6))
    strategy = replace(ONE_BUCKET_EACH, zero=2, bucket_mb=2 * ONE_BUCKET_EACH.bucket_mb)
    plan = Schedule(layout(strategy, 2, units), strategy, 2, 0, ("u0", "u2", "u4", "u1", "u3", "u5"))
    assert [bucket.units for bucket in plan.layout.buckets] == [("u4", "u5"), ("u2", "u3"), ("u0", "u1")]
    assert plan.gradient_place == {"bucket 0": 0, "bucket 1": 1, "bucket 2": 2}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("zero", [2, 3])
def test_two_places_are_enough_for_units_that_run_in_their_order(zero: int, micro_batches: int) -> None:
    strategy = replace(ONE_BUCKET_EACH, zero=zero)
    plan = schedule(strategy, 4, units=tuple(f"u{i}" for i in range(7)))
    assert [plan.gradient_place[bucket.name] for bucket in plan.reduced] == [0, 1, 0, 1, 0, 1, 0]
    assert plan.rotates
    assert set(plan.place.values()) == ({0, 1} if zero == 3 else set())
    waits = [op.after for op in plan.step(micro_batches) if op.kind == "collect"]
    assert sum(not after for after in waits) == DEPTH, "all but the first two wait for a place"
