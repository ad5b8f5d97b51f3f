"""Schedules of four units, op by op."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from paceline.core.build_layout import build_layout
from paceline.core.build_schedule import build_schedule
from paceline.core.layout import ROOT, Layout
from paceline.core.ops import PREVIOUS, STATISTICS, Key, Span
from paceline.core.placement import DEPTH
from paceline.core.schedule import Schedule
from paceline.core.strategy import SYSTEMS, Strategy
from tests.drawn import spec

UNITS = tuple(f"u{i}" for i in range(4))
SIZE = 1024 * 4
"""Bytes of each of these units."""


def layout(strategy: Strategy, world_size: int, units: tuple[str, ...] = UNITS) -> Layout:
    return build_layout([spec(f"{unit}.w", 1024, unit) for unit in units], units, strategy, world_size)


def schedule(strategy: Strategy, world_size: int, rank: int = 0, units: tuple[str, ...] = UNITS, **more) -> Schedule:
    return build_schedule(layout(strategy, world_size, units), strategy, world_size, rank, units, **more)


def words(ops) -> list[str]:
    return [f"{op.kind} {op.target}" for op in ops]


ONE_BUCKET_EACH = Strategy(bucket_mb=SIZE / 2**20)


# ---- the list as it reads


def test_overlapped_buckets_are_reduced_between_the_backwards_they_wait_for() -> None:
    assert words(schedule(ONE_BUCKET_EACH, 2).step(1)) == [
        *(f"forward u{i}" for i in range(4)),
        *("backward u3", "copy_in u3", "all_reduce bucket 0"),
        *("backward u2", "copy_in u2", "all_reduce bucket 1"),
        *("backward u1", "copy_in u1", "all_reduce bucket 2"),
        *("backward u0", "copy_in u0", "all_reduce bucket 3"),
        *("statistics statistics", "all_reduce statistics", "publish gradients", "update optimizer"),
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
        *("all_gather u0", "all_gather u1", "unshard u0", "forward u0", "reshard u0"),
        *("all_gather u2", "unshard u1", "forward u1", "reshard u1"),
        *("all_gather u3", "unshard u2", "forward u2", "reshard u2"),
        *("all_gather u4", "unshard u3", "forward u3", "reshard u3"),
        *("unshard u4", "forward u4", "reshard u4"),
        *("unshard u4", "backward u4", "reshard u4", "copy_in u4", "reduce_scatter u4"),
        *("all_gather u2", "unshard u3", "backward u3", "reshard u3", "copy_in u3", "reduce_scatter u3"),
        *("all_gather u1", "unshard u2", "backward u2", "reshard u2", "copy_in u2", "reduce_scatter u2"),
        *("all_gather u0", "unshard u1", "backward u1", "reshard u1", "copy_in u1", "reduce_scatter u1"),
        *("unshard u0", "backward u0", "reshard u0", "copy_in u0", "reduce_scatter u0"),
        *("statistics statistics", "all_reduce statistics", "publish gradients", "update optimizer"),
    ]


def test_units_are_gathered_ahead_however_gradients_are_accumulated() -> None:
    each, deferred = (
        [op.key for op in schedule(Strategy(zero=3, accumulation=policy), 2).step(2) if op.stream != "reduce"]
        for policy in ("each", "defer")
    )
    assert deferred == each
    gather, backward = Key("all_gather", "u0", 0, "backward"), Key("backward", "u1", 0, "backward")
    assert deferred.index(gather) < deferred.index(backward)


def test_hold_unshards_in_the_first_forward_and_reshards_nothing_before_the_update() -> None:
    ops = schedule(Strategy(zero=3, accumulation="hold"), 2).step(2)
    presents = [(op.kind, op.target, op.micro_batch, op.phase) for op in ops if op.kind in ("unshard", "reshard")]
    assert presents == [("unshard", f"u{i}", 0, "forward") for i in range(4)]


def test_low_precision_rounds_updated_masters_before_they_are_sent() -> None:
    ops = schedule(replace(ONE_BUCKET_EACH, zero=1, precision="bfloat16"), 2).step(1)
    update, cast, *gathers = ops[-6:]
    assert words([update, cast]) == ["update optimizer", "cast optimizer"]
    assert [span.buffer for span in update.writes] == ["master 0"] * 4
    assert [span.buffer for span in cast.writes] == ["parameters 0"] * 4
    assert {gather.after for gather in gathers} == {(cast.key,)}


def test_a_server_alone_has_gradients_and_updates() -> None:
    for rank in (0, 1):
        ops = {op.kind: op for op in schedule(SYSTEMS["parameter server"], 2, rank).step(1)}
        whole = () if rank else (Span("gradients 0", 0, 4096),)
        assert ops["publish"].reads == (*whole, Span("statistics", 0, 0))
        assert ops["update"].writes == (() if rank else (Span("parameters 0", 0, 4096),))
        assert ops["broadcast"].writes == ((Span("parameters 0", 0, 4096),) if rank else ())


def test_a_model_without_units_computes_as_its_root() -> None:
    found = build_layout([spec("w", 1024, ROOT)], (ROOT,), Strategy(zero=1), 2)
    forward, backward, *_ = Schedule(found, Strategy(zero=1), 2, 0, ()).step(1)
    assert words([forward, backward]) == [f"forward {ROOT}", f"backward {ROOT}"]
    assert forward.reads == (Span("parameters 0", 0, 1024),)
    assert forward.after == (Key("all_gather", "bucket 0", PREVIOUS, "update"),)


def test_any_unit_may_compute_with_parameters_of_none() -> None:
    specs = [spec("tied", 64, ROOT), *(spec(f"{unit}.w", 1024, unit) for unit in UNITS)]
    found = build_layout(specs, (ROOT, *UNITS), Strategy(zero=3), 2)
    for op in Schedule(found, Strategy(zero=3), 2, 0, UNITS).step(1):
        if op.kind in ("forward", "backward"):
            assert Span("unsharded (kept)", 0, 64) in op.reads


def test_after_backward_every_unit_is_copied_in_last() -> None:
    ops = schedule(replace(ONE_BUCKET_EACH, synchronize="after"), 2).step(1)
    assert [op.kind for op in ops if op.kind in ("backward", "copy_in")] == ["backward"] * 4 + ["copy_in"] * 4
    assert sum(op.stream == "reduce" for op in ops) == 4


def test_deferred_units_and_units_that_do_not_run_are_copied_in_after_the_whole_backward() -> None:
    deferred = words(schedule(ONE_BUCKET_EACH, 2, deferred=frozenset({"u3"})).step(1))
    assert deferred.index("copy_in u2") < deferred.index("backward u0") < deferred.index("copy_in u3")
    absent = words(Schedule(layout(ONE_BUCKET_EACH, 2), ONE_BUCKET_EACH, 2, 0, UNITS[1:]).step(1))
    assert "backward u0" not in absent
    assert absent.index("backward u1") < absent.index("copy_in u0") < absent.index("all_reduce bucket 3")


def test_what_never_runs_is_gathered_once_as_others_may_read_it() -> None:
    plan = Schedule(layout(Strategy(zero=3), 2), Strategy(zero=3), 2, 0, UNITS[1:])
    ops = plan.step(3)
    assert [op.micro_batch for op in ops if (op.kind, op.target) == ("all_gather", "u0")] == [0]
    assert "u0" not in plan.slot


def test_a_frozen_unit_is_gathered_but_neither_copied_in_nor_reduced() -> None:
    specs = [spec(f"{unit}.w", 1024, unit, trainable=unit != "u2") for unit in UNITS]
    plan = Schedule(build_layout(specs, UNITS, Strategy(zero=3), 2), Strategy(zero=3), 2, 0, UNITS)
    kinds = {op.kind for op in plan.step(2) if op.target.startswith("u2")}
    assert kinds == {"forward", "backward", "all_gather", "unshard", "reshard"}


@pytest.mark.parametrize("strategy", [*SYSTEMS.values(), *(Strategy(zero=zero) for zero in (1, 2, 3))])
def test_one_rank_communicates_nothing(strategy: Strategy) -> None:
    assert {op.kind for op in schedule(strategy, 1).step(2)} == {"forward", "backward", "update"}


def test_low_precision_copies_gradients_in_on_one_rank_too_because_they_change_their_dtype() -> None:
    kinds = Counter(op.kind for op in schedule(Strategy(precision="bfloat16"), 1).step(2))
    assert kinds == {"forward": 8, "backward": 8, "copy_in": 8, "publish": 1, "update": 1, "cast": 1}


@pytest.mark.parametrize(("wide", "buffer"), [(True, "gradients 0"), (False, "reduced 0 float32")])
def test_one_rank_adds_micro_batches_up_as_it_copies_them_in(wide: bool, buffer: str) -> None:
    plan = schedule(Strategy(precision="bfloat16", reduce_in_float32=wide), 1)
    assert [held.name for held in plan.buffers(3)] == ["parameters 0", "master 0", buffer]
    for op in plan.step(3):
        if op.kind == "copy_in":
            assert [span.buffer for span in op.writes] == [buffer]
            assert op.reads == (op.writes if op.micro_batch else ())


def test_deferred_micro_batches_are_added_to_those_before() -> None:
    for strategy in (ONE_BUCKET_EACH, replace(ONE_BUCKET_EACH, accumulation="each")):
        for op in schedule(strategy, 2).step(3):
            if op.kind == "copy_in":
                assert op.reads == (op.writes if op.micro_batch and not strategy.reduces_every_micro_batch else ())


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
    assert [op.micro_batch for op in ops if op.target == STATISTICS and op.kind == "all_reduce"] == [3]


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


def test_buckets_whose_units_run_between_each_other_have_a_slot_each() -> None:
    units = tuple(f"u{i}" for i in range(6))
    strategy = replace(ONE_BUCKET_EACH, zero=2, bucket_mb=2 * ONE_BUCKET_EACH.bucket_mb)
    plan = Schedule(layout(strategy, 2, units), strategy, 2, 0, ("u0", "u2", "u4", "u1", "u3", "u5"))
    assert [bucket.units for bucket in plan.layout.buckets] == [("u4", "u5"), ("u2", "u3"), ("u0", "u1")]
    assert plan.gradient_slot == {"bucket 0": 0, "bucket 1": 1, "bucket 2": 2}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("zero", [2, 3])
def test_two_slots_are_enough_for_units_that_run_in_their_order(zero: int, micro_batches: int) -> None:
    strategy = replace(ONE_BUCKET_EACH, zero=zero)
    plan = schedule(strategy, 4, units=tuple(f"u{i}" for i in range(7)))
    assert [plan.gradient_slot[bucket.name] for bucket in plan.reduced_buckets] == [0, 1, 0, 1, 0, 1, 0]
    assert plan.reuses_gradient_slots
    assert set(plan.slot.values()) == ({0, 1} if zero == 3 else set())
    waits = [op.after for op in plan.step(micro_batches) if op.kind == "copy_in"]
    assert sum(not after for after in waits) == DEPTH, "all but the first two wait for a slot"
