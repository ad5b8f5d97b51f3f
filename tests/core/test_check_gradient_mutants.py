"""Every way to lose gradients, to count them otherwise or to mix them that we know of is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import pytest

from paceline.core.check import all_ranks, check
from paceline.core.ops import GRADIENTS, Op
from paceline.core.schedule import Schedule
from paceline.core.strategy import SYSTEMS, Strategy
from tests.core.broken import RIGHT, UNITS, broken, found, job, key_of, moved, without


def test_a_slot_of_gradients_that_is_filled_too_early_is_found() -> None:
    ranks = job(RIGHT["zero 2"])
    ops = ranks[0].step(1)
    copy, reduction = key_of(ops, "copy_in", "u2"), key_of(ops, "reduce_scatter", "bucket 0")
    assert reduction in next(op.after for op in ops if op.key == copy)
    backward = key_of(ops, "backward", "u2")
    unwaited = broken(ranks, lambda _, ops: [replace(op, after=()) if op.key == copy else op for op in ops])
    found(unwaited, "race: rank 0: copy_in of u2", "'gradient slot 0 float32' before it is written by reduce_scatter")
    # On paper in front of the reduction, too: then another unit's gradients would be reduced.
    late = broken(ranks, lambda _, ops: moved(moved(ops, backward, reduction), copy, reduction))
    found(late, "gradients", "reduce_scatter of bucket 0", "gradients of bucket 2, not gradients of bucket 0")


@pytest.mark.parametrize("name", ["zero 0", "zero 1", "zero 2", "zero 3", "hybrid", "sum", "bfloat16"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_bucket_that_is_reduced_twice_is_found(name: str, micro_batches: int) -> None:
    ranks = job(RIGHT[name])

    def again(_: int, ops: list[Op]) -> list[Op]:
        place, op = next((i, op) for i, op in enumerate(ops) if op.stream == "reduce")
        twice = replace(op, phase="update", after=(op.key,))
        return [*ops[: place + 1], twice, *ops[place + 1 :]]

    report = broken(ranks, again, micro_batches)
    assert {fault.kind for fault in report.faults} & {"gradients"}, report.faults


@pytest.mark.parametrize("name", ["zero 0", "zero 1", "zero 2", "zero 3", "hybrid", "parameter server"])
def test_a_bucket_that_is_never_reduced_is_found(name: str) -> None:
    ranks = job(RIGHT[name])
    key = next(op.key for op in ranks[0].step(1) if op.stream == "reduce")
    report = broken(ranks, lambda _, ops: without(ops, key))
    assert {fault.kind for fault in report.faults} == {"gradients"}


def test_the_missing_half_of_a_hybrid_reduction_is_named() -> None:
    ranks = job(RIGHT["hybrid"])
    key = next(op.key for op in ranks[0].step(1) if op.stream == "replicate")
    report = broken(ranks, lambda _, ops: without(ops, key))
    found(
        report, "gradients: rank 0: statistics", "gradients of bucket 0: the contribution of rank 2 in micro-batch 0 is"
    )


def test_groups_of_a_wrong_mesh_lose_gradients() -> None:
    class Crossed(Schedule):
        @cached_property
        def groups(self):
            return {**super().groups, "reduce": "replicate", "replicate": "shard"}

    ranks = [Crossed(r.layout, r.strategy, 4, r.rank, r.order) for r in job(RIGHT["hybrid"])]
    found(check(ranks), "gradients", "reduce_scatter of bucket 0", "leaves this rank another shard than its own")


@pytest.mark.parametrize("name", ["zero 0", "zero 2", "hybrid", "sum", "parameter server"])
@pytest.mark.parametrize("whose", [(0, 1, 2, 3), (3,)])
def test_a_wrong_scale_is_found(name: str, whose: tuple[int, ...]) -> None:
    ranks = job(RIGHT[name])

    class Scaled(type(ranks[0])):
        @property
        def scale(self) -> float:
            return super().scale / 2

    ranks = [(Scaled if r.rank in whose else type(r))(r.layout, r.strategy, 4, r.rank, r.order) for r in ranks]
    if len(whose) == 4:
        wanted = 1 if name == "sum" else 0.25
        found(check(ranks), "gradients", "rank 0 in micro-batch 0 counts", f"{wanted / 2:g} times, not {wanted:g}")
    else:
        found(check(ranks), "sequence: rank 3:", "multiplies the sum by", "but on rank")


def test_a_missing_copy_in_is_found() -> None:
    for name in RIGHT:
        ranks = job(RIGHT[name])
        key = key_of(ranks[0].step(2), "copy_in", "u2", micro_batch=1)
        assert broken(ranks, lambda _, ops, key=key: without(ops, key), 2).faults, name
        one = broken(ranks, lambda rank, ops, key=key: without(ops, key) if rank == 3 else ops, 2)
        assert {fault.rank for fault in one.faults} == {3} or one.faults, name
    ranks = job(Strategy(zero=0))
    key = key_of(ranks[0].step(1), "copy_in", "u2")
    found(
        broken(ranks, lambda rank, ops: without(ops, key) if rank == 3 else ops),
        "gradients: rank 3: all_reduce of bucket 0 (micro-batch 0, backward) finds in [2,048, 3,072) of buffer",
        "'gradients 0' nothing yet, not gradients of bucket 0",
    )


def test_a_micro_batch_that_overwrites_the_one_before_is_found() -> None:
    ranks = job(RIGHT["zero 0"])
    report = broken(
        ranks, lambda _, ops: [replace(op, reads=()) if op.kind == "copy_in" else op for op in ops], micro_batches=2
    )
    found(report, "gradients", "gradients of bucket 0: the contribution of rank 0 in micro-batch 0 is missing")


def test_gradients_that_are_not_widened_are_found() -> None:
    for name in ("bfloat16", "reduced in bfloat16"):
        report = broken(job(RIGHT[name]), lambda _, ops: without(ops, key_of(ops, "widen", GRADIENTS)))
        found(report, "gradients: rank 0: publish of gradients", "of buffer 'widened 0' nothing yet, not gradients of")


def test_gradients_that_are_copied_before_their_backward_are_found() -> None:
    ranks = job(RIGHT["zero 0"])
    ops = ranks[0].step(1)
    report = broken(ranks, lambda _, ops: moved(ops, key_of(ops, "copy_in", "u2"), key_of(ops, "backward", "u2")))
    assert ops
    found(report, "gradients", "copy_in of u2", "comes before the backward of u2")


def test_a_worker_that_takes_its_own_gradients_for_reduced_ones_is_found() -> None:
    ranks = job(SYSTEMS["parameter server"])
    reads = next(op.reads for op in ranks[0].step(1) if op.kind == "publish")
    report = broken(ranks, lambda _, ops: [replace(op, reads=reads) if op.kind == "publish" else op for op in ops])
    found(report, "gradients: rank 1: publish of gradients", "of buffer 'gradients 0', where this rank has nothing")


def test_a_parameter_in_no_bucket_is_found() -> None:
    ranks = job(RIGHT["zero 0"])
    layout = replace(ranks[0].layout, buckets=ranks[0].layout.buckets[1:])
    ranks = all_ranks(layout, RIGHT["zero 0"], 4, UNITS)
    found(check(ranks), "gradients", "parameter u4.w is in no bucket: nothing would update it")
