"""Every way to break a schedule's order, sizes, groups and parameters that we know of is found."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.core.check import ScheduleError
from paceline.core.layout import ROOT
from paceline.core.ops import COMPUTE, OPTIMIZER, READ, WRITTEN, Key, Op
from paceline.core.schedule import Schedule
from tests.core.broken import RIGHT, broken, found, job, key_of, moved, patient, several, without
from tests.drawn import jobs, micro_batch_counts


@patient
@given(jobs(several), micro_batch_counts, st.data())
def test_an_op_that_nobody_issues_is_missed(ranks: list[Schedule], micro_batches: int, data: st.DataObject) -> None:
    assume(any(bucket.trainable for bucket in ranks[0].layout.buckets))
    # A reshard is a mark that gathers wait for; what moves or computes nothing is not needed.
    candidates = [
        key
        for position in zip(*(rank.step(micro_batches) for rank in ranks), strict=True)
        for key in {op.key for op in position}
        if position[0].kind != "reshard"
        and (
            position[0].kind in ("barrier", "forward", "backward")
            or any(span.start < span.stop for op in position for span in (*op.reads, *op.writes))
        )
    ]
    key = data.draw(st.sampled_from(candidates))
    assert broken(ranks, lambda _, ops: without(ops, key), micro_batches).faults, key


@patient
@given(jobs(several), micro_batch_counts, st.data())
def test_collectives_in_another_order_on_one_rank_are_found(ranks, micro_batches: int, data: st.DataObject) -> None:
    ops = ranks[0].step(micro_batches)
    pairs = [
        (first, second)
        for stream in dict.fromkeys(op.stream for op in ops if op.stream != "compute")
        for first, second in itertools.pairwise([i for i, op in enumerate(ops) if op.stream == stream])
    ]
    assume(pairs)
    first, second = data.draw(st.sampled_from(pairs))
    odd = data.draw(st.integers(0, len(ranks) - 1))

    def swap(rank: int, ops: list[Op]) -> list[Op]:
        if rank == odd:
            # Each takes the other's place and what it waits for, so that the list by itself can be run.
            ops[first], ops[second] = (
                replace(ops[second], after=ops[first].after),
                replace(ops[first], after=ops[second].after),
            )
        return ops

    assert broken(ranks, swap, micro_batches).faults


def test_two_streams_that_wait_for_each_other_across_ranks_are_a_deadlock() -> None:
    ranks = job(RIGHT["zero 3"], 2)
    steps = [list(rank.step(1)) for rank in ranks]
    gather, reduction = key_of(steps[0], "all_gather", "u1", "backward"), key_of(steps[0], "reduce_scatter", "u3")

    def tangle(rank: int, ops: list[Op]) -> list[Op]:
        at = {op.key: index for index, op in enumerate(ops)}
        first, second = (reduction, gather) if rank else (gather, reduction)
        op, other = ops.pop(max(at[first], at[second])), ops.pop(min(at[first], at[second]))
        op, other = (op, other) if op.key == second else (other, op)
        place = max(at[first], at[second]) - 1
        ops[place:place] = [other, replace(op, after=(*op.after, first))]
        return ops

    found(
        broken(ranks, tangle),
        "deadlock: rank 0: all_gather of u1 (micro-batch 0, backward) waits forever on stream gather",
        "other ranks of its group never come to it",
    )
    found(broken(ranks, tangle), "deadlock: rank 0: reduce_scatter of u3", "is never over: all_gather of u1")


def test_a_collective_that_one_rank_leaves_out_is_found() -> None:
    ranks = job(RIGHT["zero 0"])
    key = key_of(ranks[0].step(1), "all_reduce", "bucket 1")
    report = broken(ranks, lambda rank, ops: without(ops, key) if rank == 2 else ops)
    found(report, "sequence: rank 2: next on stream reduce is all_reduce of bucket 2", "they would mix the two")


def test_an_op_that_waits_for_nothing_there_is_found() -> None:
    ranks = job(RIGHT["zero 0"])
    nothing = Key("all_reduce", "bucket 9", 0, "backward")
    report = broken(ranks, lambda _, ops: [*ops[:-1], replace(ops[-1], after=(*ops[-1].after, nothing))])
    found(report, "deadlock", "update of optimizer", "comes after all_reduce of bucket 9", "which no op before it is")


def test_a_slot_that_is_gathered_into_one_op_early_is_found() -> None:
    ranks = job(RIGHT["zero 3"])
    ops = ranks[0].step(1)
    gather, reshard = key_of(ops, "all_gather", "u2", "forward"), key_of(ops, "reshard", "u0", "forward")
    unshard, forward = key_of(ops, "unshard", "u0", "forward"), key_of(ops, "forward", "u0")
    early = broken(ranks, lambda _, ops: [replace(op, after=(forward,)) if op.key == gather else op for op in ops])
    found(
        early, "race: rank 0: all_gather of u2", "'unsharded slot 0'", "read by reshard of u0 (micro-batch 0, forward)"
    )
    earlier = broken(ranks, lambda _, ops: moved(ops, gather, reshard))
    found(earlier, "race: rank 0: all_gather of u2", "before it is read by forward of u0")
    earliest = broken(ranks, lambda _, ops: moved(ops, gather, unshard))
    found(earliest, "contents: rank 0: unshard of u0", "parameters of u2 after 0 updates, not parameters of u0")


@pytest.mark.parametrize("name", ["hybrid", "hybrid zero 3"])
@pytest.mark.parametrize("whose", [(0, 1, 2, 3), (1,)])
def test_a_wrong_group_is_found(name: str, whose: tuple[int, ...]) -> None:
    ranks = job(RIGHT[name])

    def regroup(rank: int, ops: list[Op]) -> list[Op]:
        place = next(i for i, op in enumerate(ops) if op.kind == "reduce_scatter")
        if rank in whose:
            ops[place] = replace(ops[place], group="replicate")
        return ops

    found(broken(ranks, regroup), "sequence", "among the ranks of group 'replicate', but stream reduce connects")


@patient
@given(jobs(several), micro_batch_counts, st.data())
def test_a_wrong_size_is_found(ranks: list[Schedule], micro_batches: int, data: st.DataObject) -> None:
    sized = [op.key for op in ranks[0].step(micro_batches) if op.kind not in COMPUTE]
    assume(sized)
    key = data.draw(st.sampled_from(sized))
    whose = data.draw(st.sampled_from([range(len(ranks)), [len(ranks) - 1]]))
    by = data.draw(st.sampled_from([-8, 8]))
    report = broken(
        ranks,
        lambda rank, ops: [replace(op, bytes=op.bytes + by) if op.key == key and rank in whose else op for op in ops],
        micro_batches,
    )
    # A barrier carries nothing of a size.
    assert report.faults or (key.kind == "barrier" and len(whose) == len(ranks))


@patient
@given(jobs(several), micro_batch_counts, st.data())
def test_a_span_of_another_size_is_found(ranks: list[Schedule], micro_batches: int, data: st.DataObject) -> None:
    ops = ranks[0].step(micro_batches)
    candidates = [
        (op.key, side, index)
        for op in ops
        for side in ("reads", "writes")
        for index, span in enumerate(getattr(op, side))
        if span.stop > span.start
    ]
    assume(candidates)
    key, side, index = data.draw(st.sampled_from(candidates))

    def shrink(_: int, ops: list[Op]) -> list[Op]:
        place = next(i for i, op in enumerate(ops) if op.key == key)
        spans = list(getattr(ops[place], side))
        if index < len(spans):
            spans[index] = spans[index]._replace(stop=spans[index].stop - 1)
        ops[place] = replace(ops[place], **{side: tuple(spans)})
        return ops

    assert broken(ranks, shrink, micro_batches).faults, (key, side, index)


@pytest.mark.parametrize("name", ["bfloat16", "zero 3 in bfloat16", "shared in bfloat16"])
def test_a_missing_cast_is_found(name: str) -> None:
    ranks = job(RIGHT[name])
    report = broken(ranks, lambda _, ops: without(ops, key_of(ops, "cast", OPTIMIZER)))
    found(report, "contents", "after 0 updates, not parameters of", "after 1 update")


@pytest.mark.parametrize("target", [READ, WRITTEN])
def test_a_missing_barrier_is_found(target: str) -> None:
    ranks = job(RIGHT["shared"])
    report = broken(ranks, lambda _, ops: without(ops, key_of(ops, "barrier", target)))
    found(report, "race", "update of optimizer", "'parameters 0', which ranks share", "no barrier keeps them apart")


def test_a_unit_that_computes_without_being_unsharded_is_found() -> None:
    ranks = job(RIGHT["zero 3"])
    key = key_of(ranks[0].step(1), "unshard", "u2", "backward")
    report = broken(ranks, lambda _, ops: without(ops, key))
    found(report, "contents", "backward of u2", "computes with parameters that nothing has unsharded")


def test_what_peers_cannot_reach_is_found() -> None:
    ranks = job(RIGHT["zero 1"])

    def elsewhere(_: int, ops: list[Op]) -> list[Op]:
        place = next(i for i, op in enumerate(ops) if op.kind == "reduce_scatter")
        reads = tuple(span._replace(buffer="parameters 0") for span in ops[place].reads)
        ops[place] = replace(ops[place], reads=reads, writes=reads)
        return ops

    found(broken(ranks, elsewhere), "size", "'parameters 0', which peers cannot reach on stream reduce")


def test_what_is_wrong_is_raised_line_by_line() -> None:
    ranks = job(RIGHT["zero 0"])
    report = broken(ranks, lambda _, ops: without(ops, key_of(ops, "copy_in", "u2")))
    with pytest.raises(ScheduleError, match=r"rank 0: all_reduce of bucket 2 \(micro-batch 0, backward\) finds in"):
        report.require()
    assert ROOT not in str(report.to_dict())
