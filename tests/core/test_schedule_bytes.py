"""What a schedule sends, held against the formulas."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings

from paceline.core.layout import Bucket
from paceline.core.ops import COMPUTE, STATISTICS
from paceline.core.schedule import Schedule
from paceline.core.strategy import SYSTEMS, Strategy
from tests.core.test_schedule import SIZE, schedule
from tests.drawn import micro_batch_counts, schedules
from tests.quick import examples


def sent(plan: Schedule, micro_batches: int) -> dict[str, int]:
    """Bytes that a rank sends in a step for parameters and gradients, by collective."""
    found: Counter[str] = Counter()
    for op in plan.step(micro_batches):
        if op.kind not in COMPUTE and op.target != STATISTICS:
            found[op.kind] += op.sent
    return {kind: size for kind, size in found.items() if size}


@pytest.mark.parametrize("world_size", [2, 3, 8, 10])
@pytest.mark.parametrize(
    ("strategy", "micro_batches", "times"),
    [
        (Strategy(), 1, 2),
        (Strategy(), 4, 2),
        (Strategy(zero=1), 1, 2),
        (Strategy(zero=1), 4, 2),
        (Strategy(zero=2), 1, 2),
        (Strategy(zero=2), 4, 5),
        (Strategy(zero=2, accumulation="defer"), 4, 2),
        # Of ten equal units two stay gathered at each turn: from forward to backward, and on to the next micro-batch.
        (Strategy(zero=3), 1, Fraction(28, 10)),
        (Strategy(zero=3), 4, Fraction(4 * 30 - 4 * 2 - 3 * 2, 10)),
        (Strategy(zero=3, accumulation="defer"), 4, Fraction(4 * 20 - 4 * 2 - 3 * 2 + 10, 10)),
        (Strategy(zero=3, accumulation="hold"), 4, 5),
    ],
)
def test_a_rank_sends_so_many_times_the_parameters_times_n_minus_1_over_n(
    strategy: Strategy, micro_batches: int, times: int | Fraction, world_size: int
) -> None:
    plan = schedule(strategy, world_size, rank=world_size - 1, units=tuple(f"u{i}" for i in range(10)))
    parameters = sum(bucket.bytes for bucket in plan.layout.buckets)
    assert parameters == 10 * SIZE + plan.layout.padding_bytes
    assert sum(sent(plan, micro_batches).values()) == times * Fraction(world_size - 1, world_size) * parameters
    ops = [op for op in plan.step(micro_batches) if op.kind not in COMPUTE]
    assert sum(op.received for op in ops) == sum(op.sent for op in ops)


def stage_3_gathers(buckets: tuple[Bucket, ...], order: tuple[str, ...], micro_batches: int, strategy: Strategy) -> int:
    """Bytes of parameters that pass through a rank's memory in a step, own shards included.

    Whatever moves does so in every forward and every backward, but for what is still in its place: at the turn the
    last units that there are slots for (all with hold), and between micro-batches the first ones. The rest is gathered
    once.
    """
    sizes = [sum(b.bytes for b in buckets if b.units == (unit,) and not b.kept) for unit in order]
    sizes = [size for size in sizes if size]
    kept = len(sizes) if strategy.accumulation == "hold" else strategy.prefetch + 1
    sharded = sum(sizes)
    forward = sharded + (micro_batches - 1) * (sharded - sum(sizes[:kept]))
    backward = micro_batches * (sharded - sum(sizes[max(len(sizes) - kept, 0) :]))
    return sum(bucket.bytes for bucket in buckets) - sharded + forward + backward


@settings(max_examples=examples(300))
@given(schedules(), micro_batch_counts)
def test_bytes_sent_are_those_of_the_formulas(plan: Schedule, micro_batches: int) -> None:
    strategy, ranks = plan.strategy, plan.world_size
    if strategy.collective == "parameter_server" or ranks == 1:
        return
    buckets = plan.layout.buckets
    trainable = [bucket for bucket in buckets if bucket.trainable]
    gradients = sum(bucket.numel * bucket.gradient_itemsize for bucket in trainable)
    reductions = micro_batches if strategy.reduces_every_micro_batch else 1
    group = 1 if strategy.stage == 0 else strategy.shard or ranks
    of_group = Fraction(group - 1, group)
    if group == 1:
        expected = {"all_reduce": 2 * Fraction(ranks - 1, ranks) * gradients * reductions}
    else:
        parameters = sum(bucket.bytes for bucket in trainable)
        if strategy.share_parameters:
            parameters = 0
        elif strategy.stage == 3:
            parameters = stage_3_gathers(buckets, plan.order, micro_batches, strategy)
        # Sums over micro-batches are kept in the dtype that is updated, and replicas reduce those once.
        sums = gradients
        if reductions > 1:
            sums = sum(b.numel * plan.layout.flats[b.flat].master_itemsize for b in trainable)
        replicas = ranks // group
        expected = {
            "all_gather": of_group * parameters,
            "reduce_scatter": of_group * gradients * reductions,
            "all_reduce": 2 * Fraction(replicas - 1, replicas) * Fraction(sums, group),
        }
    found = sent(plan, micro_batches)
    assert ("barrier" in found) == plan.shares_memory
    found.pop("barrier", None)
    assert found == {kind: size for kind, size in expected.items() if size}


def test_low_precision_gathers_2_bytes_and_reduces_4_or_2() -> None:
    for wide, itemsize in ((True, 4), (False, 2)):
        strategy = Strategy(zero=2, precision="bfloat16", reduce_in_float32=wide)
        assert sent(schedule(strategy, 2), 1) == {
            "all_gather": 4 * 1024 * 2 // 2,
            "reduce_scatter": 4 * 1024 * itemsize // 2,
        }


def test_groups_of_8_on_64_ranks_keep_most_bytes_inside_the_group() -> None:
    plan = schedule(Strategy(zero=1, shard=8), 64)
    size = sum(bucket.bytes for bucket in plan.layout.buckets)
    assert sent(plan, 1) == {
        "reduce_scatter": size * 7 // 8,
        "all_reduce": 2 * size // 8 * 7 // 8,
        "all_gather": size * 7 // 8,
    }


def test_the_parameter_server_receives_m_times_n_minus_1() -> None:
    strategy = SYSTEMS["parameter server"]
    for world_size in (2, 5, 10):
        server, client = (schedule(strategy, world_size, rank) for rank in (0, 1))
        size = server.layout.buckets[0].bytes
        in_server = [op for op in server.step(1) if op.kind == "reduce"]
        assert sum(op.received for op in in_server) == size * (world_size - 1)
        assert sent(client, 1) == {"reduce": size}
        assert sent(server, 1) == {"broadcast": size * (world_size - 1)}


@given(schedules(), micro_batch_counts)
def test_statistics_are_eight_bytes_each(plan: Schedule, micro_batches: int) -> None:
    statistics = [op for op in plan.step(micro_batches) if op.target == STATISTICS and op.kind == "all_reduce"]
    assert [op.bytes for op in statistics] == ([72] if plan.world_size > 1 else [])
