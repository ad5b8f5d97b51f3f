"""Schedules that are right pass the check, and every way to break one that we know of is found."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from paceline.core.build_layout import build_layout
from paceline.core.check import Lifetime, Report, ScheduleError, all_ranks, check, lifetimes
from paceline.core.check.checker import check_steps
from paceline.core.check.sequences import Sequences
from paceline.core.layout import ROOT
from paceline.core.ops import COMPUTE, GRADIENTS, OPTIMIZER, PREVIOUS, READ, STATISTICS, WRITTEN, Key, Op, Span
from paceline.core.schedule import Schedule
from paceline.core.strategy import SYSTEMS, Strategy
from tests.drawn import jobs, micro_batch_counts, spec
from tests.quick import examples

UNITS = tuple(f"u{i}" for i in range(5))
patient = settings(max_examples=examples(120), suppress_health_check=list(HealthCheck), deadline=None)
several = st.sampled_from([2, 3, 4, 4, 6])

Steps = list[tuple[Op, ...]]


def job(strategy: Strategy, world_size: int = 4, units: Sequence[str] = UNITS, numel: int = 1024) -> list[Schedule]:
    layout = build_layout([spec(f"{unit}.w", numel, unit) for unit in units], units, strategy, world_size)
    return all_ranks(layout, strategy, world_size, units)


BUCKETS = {"bucket_mb": 1024 * 4 / 2**20}
"""One unit each."""

RIGHT: dict[str, Strategy] = {
    **SYSTEMS,
    **{f"zero {zero}": Strategy(zero=zero, **BUCKETS) for zero in (0, 1, 2, 3)},
    "bfloat16": Strategy(zero=1, precision="bfloat16", reduce_in_float32=False),
    "zero 3 in bfloat16": Strategy(zero=3, precision="bfloat16"),
    "hybrid": Strategy(zero=2, shard=2, **BUCKETS),
    "hybrid zero 3": Strategy(zero=3, shard=2),
    "hold": Strategy(zero=3, accumulation="hold"),
    "shared": Strategy(zero=2, share_parameters=True, **BUCKETS),
    "shared in bfloat16": Strategy(zero=2, share_parameters=True, precision="bfloat16", **BUCKETS),
    "sum": Strategy(gradients="sum", **BUCKETS),
}


def broken(ranks: Sequence[Schedule], change: Callable[[int, list[Op]], list[Op]], micro_batches: int = 1) -> Report:
    """The check of schedules after each rank's list of ops was changed."""
    steps = [tuple(change(rank, list(schedule.step(micro_batches)))) for rank, schedule in enumerate(ranks)]
    return check_steps(ranks, steps, micro_batches)


def without(ops: list[Op], *keys: Key) -> list[Op]:
    """What is left when nobody issues some ops, nor waits for them."""
    gone = set(keys) | {key._replace(micro_batch=PREVIOUS) for key in keys}
    return [replace(op, after=tuple(k for k in op.after if k not in gone)) for op in ops if op.key not in gone]


def key_of(ops: Sequence[Op], kind: str, target: str, phase: str | None = None, micro_batch: int = 0) -> Key:
    return next(
        op.key
        for op in ops
        if (op.kind, op.target, op.micro_batch) == (kind, target, micro_batch) and phase in (None, op.phase)
    )


def found(report: Report, kind: str, *words: str) -> None:
    """That some fault is of a kind and says all of some words."""
    told = [f"{fault.kind}: {fault}" for fault in report.faults]
    assert any(each.startswith(kind) and all(word in each for word in words) for each in told), told


# ---- what is right


@settings(max_examples=examples(250), suppress_health_check=list(HealthCheck))
@given(jobs(), micro_batch_counts)
def test_every_schedule_is_right(ranks: list[Schedule], micro_batches: int) -> None:
    report = check(ranks, micro_batches)
    assert not report.faults, "\n".join(map(str, report.faults))
    assert (report.ranks, report.ops) == (len(ranks), len(ranks[0].step(micro_batches)))


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(jobs(st.sampled_from([12, 16, 24, 32, 48, 64])), micro_batch_counts)
def test_up_to_64_ranks(ranks: list[Schedule], micro_batches: int) -> None:
    assert not check(ranks, micro_batches).require().faults


@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(jobs(several), micro_batch_counts)
def test_ranks_at_a_pace_of_their_own_end_up_with_the_same(ranks: list[Schedule], micro_batches: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequences, "_in_step", Sequences._simulated)
        assert not check(ranks, micro_batches).require().faults


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_report_counts_what_was_looked_at(name: str, micro_batches: int) -> None:
    ranks = job(RIGHT[name])
    report = check(ranks, micro_batches).require()
    ops = ranks[0].step(micro_batches)
    assert report.collectives == sum(op.kind not in COMPUTE for op in ops)
    # With the parameter server rank 0 differs; where a rank's shard is a part of the whole, all do.
    own = ranks[0].strategy.stage in (1, 2) or ranks[0].strategy.share_parameters
    assert report.kinds == (2 if ranks[0].has_server else ranks[0].shards if own else 1)
    assert report.pairs > report.collectives
    assert report.sent == max(sum(op.sent for op in rank.step(micro_batches)) for rank in ranks)
    assert report.to_dict()["faults"] == []
    assert report.to_dict()["memory"]["total"] == report.memory.total


def test_lifetimes_are_from_the_first_write_to_the_last_read() -> None:
    (rank, *_) = job(Strategy(zero=3))
    ops = rank.step(1)
    found = lifetimes(ops)
    at = {op.key: position for position, op in enumerate(ops)}
    assert found["unsharded slot 0"] == Lifetime(
        at[key_of(ops, "all_gather", "u0", "forward")], at[key_of(ops, "reshard", "u0", "backward")]
    )
    assert found["gradient slot 1 float32"] == Lifetime(
        at[key_of(ops, "copy_in", "u3")], at[key_of(ops, "reduce_scatter", "u1")]
    )
    assert found["parameters 0"] == Lifetime(at[key_of(ops, "update", OPTIMIZER)], at[key_of(ops, "update", OPTIMIZER)])
    assert set(found) == {buffer.name for buffer in rank.buffers() if buffer.numel}


# ---- edges: what an op comes after


class Oracle:
    """The same question answered the slow way: every pair of ops of all ranks, with reachability in one graph."""

    def __init__(self, ranks: Sequence[Schedule], micro_batches: int) -> None:
        self.ranks, self.last = ranks, micro_batches - 1
        self.steps = [rank.step(micro_batches) for rank in ranks]
        self.shared = {buffer.name for buffer in ranks[0].buffers(micro_batches) if buffer.shared}
        self.conflicts = self._conflicts()

    def _nodes(self) -> list[tuple[int, int, int]]:
        return [
            (step, index, rank)
            for step in (0, 1)
            for index in range(len(self.steps[0]))
            for rank in range(len(self.ranks))
        ]

    def _conflicts(self) -> set[tuple[tuple[int, int, int], tuple[int, int, int]]]:
        touching: dict[tuple[int, str], list[tuple[int, int, Span, bool]]] = defaultdict(list)
        for rank, ops in enumerate(self.steps):
            for index, op in enumerate(ops):
                for writes, spans in ((False, op.reads), (True, op.writes)):
                    for span in spans:
                        # What a group shares is the memory of its first rank.
                        owner = rank - rank % self.ranks[0].shards if span.buffer in self.shared else rank
                        touching[owner, span.buffer].append((index, rank, span, writes))
        found = set()
        for accesses in touching.values():
            for (i, r, x, x_writes), (j, q, y, y_writes) in itertools.product(accesses, repeat=2):
                if (x_writes or y_writes) and x.overlaps(y):
                    found |= {((0, i, r), (1, j, q))}
                    if (i, r) < (j, q):
                        found |= {((step, i, r), (step, j, q)) for step in (0, 1)}
        return found

    def orders_all(self, after: Callable[[int, Op], tuple[Key, ...]]) -> bool:
        """Whether all conflicting pairs are in order where ops come after what `after` says."""
        masks: dict[tuple[int, int, int], int] = {}
        number = {node: index for index, node in enumerate(self._nodes())}
        on_stream: dict[tuple[int, str], int] = {}
        fence: dict[int, int] = {}
        at = {(rank, op.key): index for rank, ops in enumerate(self.steps) for index, op in enumerate(ops)}
        for step in (0, 1):
            if step:
                fence = {rank: on_stream[rank, "compute"] for rank in range(len(self.ranks))}
            for index in range(len(self.steps[0])):
                for rank, ops in enumerate(self.steps):
                    op = ops[index]
                    mask = on_stream.get((rank, op.stream), 0) | fence.get(rank, 0)
                    for key in after(rank, op):
                        when = step
                        if key.micro_batch == PREVIOUS:
                            when, key = step - 1, key._replace(micro_batch=self.last)
                        if when >= 0:
                            mask |= masks[when, at[rank, key], rank]
                    masks[step, index, rank] = mask | 1 << number[step, index, rank]
                if self.steps[0][index].kind == "barrier":
                    for group in self.ranks[0].ranks_of("shard"):
                        union = 0
                        for rank in group:
                            union |= masks[step, index, rank]
                        masks.update({(step, index, rank): union for rank in group})
                for rank, ops in enumerate(self.steps):
                    on_stream[rank, ops[index].stream] = masks[step, index, rank]
        return all(masks[b] >> number[a] & 1 or masks[a] >> number[b] & 1 for a, b in self.conflicts)


@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(jobs(st.sampled_from([1, 2, 2, 3, 4])), st.integers(1, 2), st.data())
def test_an_edge_that_is_needed_is_missed_and_no_other_is(ranks: list[Schedule], micro_batches: int, data) -> None:
    oracle = Oracle(ranks, micro_batches)
    assert oracle.orders_all(lambda _, op: op.after)
    edges = [(op.key, key) for op in ranks[0].step(micro_batches) for key in op.after]
    assume(edges)
    for _ in range(4):
        victim, edge = data.draw(st.sampled_from(edges))
        whose = data.draw(st.sampled_from([range(len(ranks)), [len(ranks) - 1]]))

        def left(rank: int, op: Op, victim=victim, edge=edge, whose=whose) -> tuple[Key, ...]:
            return tuple(key for key in op.after if op.key != victim or key != edge or rank not in whose)

        report = broken(
            ranks, lambda rank, ops, left=left: [replace(op, after=left(rank, op)) for op in ops], micro_batches
        )
        needed = not oracle.orders_all(left)
        assert bool(report.faults) == needed, (victim, edge, whose, [str(fault) for fault in report.faults])
        assert {fault.kind for fault in report.faults} <= {"race"} or whose != range(len(ranks))


EDGES = {
    "a unit computes with what is gathered": ("zero 3", "unshard", "u2", "all_gather", "u2"),
    "a gather waits until its slot is free": ("zero 3", "all_gather", "u3", "reshard", "u1"),
    "a unit waits for its update": ("zero 1", "forward", "u2", "all_gather", "bucket 2"),
    "an update is sent when it is there": ("zero 1", "all_gather", "bucket 4", "update", OPTIMIZER),
    "a worker waits for the server": ("parameter server", "forward", "u0", "broadcast", "bucket 0"),
    "the server sends what it updated": ("parameter server", "broadcast", "bucket 0", "update", OPTIMIZER),
    "gradients are reduced when they are there": ("zero 0", "all_reduce", "bucket 2", "copy_in", "u2"),
    "a slot of gradients is reduced before it is lent": ("zero 2", "copy_in", "u1", "reduce_scatter", "bucket 1"),
    "replicas reduce what is reduced": ("hybrid", "all_reduce", "bucket 2", "reduce_scatter", "bucket 2"),
    "statistics wait for the norm": ("zero 2", "statistics", STATISTICS, "reduce_scatter", "bucket 4"),
    "ranks agree on what is filled": ("zero 0", "all_reduce", STATISTICS, "statistics", STATISTICS),
    "gradients are published when reduced": ("zero 0", "publish", GRADIENTS, "all_reduce", "bucket 4"),
    "what ranks agree on is known": ("zero 0", "publish", GRADIENTS, "all_reduce", STATISTICS),
    "nobody reads what is updated": ("shared", "update", OPTIMIZER, "barrier", READ),
    "all have done with the parameters": ("shared", "barrier", READ, "publish", GRADIENTS),
    "all are told of the update": ("shared", "barrier", WRITTEN, "update", OPTIMIZER),
    "all wait for the update": ("shared", "forward", "u0", "barrier", WRITTEN),
}


@pytest.mark.parametrize("name", EDGES)
def test_every_kind_of_edge_is_missed(name: str) -> None:
    strategy, kind, target, *edge = EDGES[name]
    ranks = job(RIGHT[strategy])

    def cut(op: Op) -> Op:
        if (op.kind, op.target) != (kind, target):
            return op
        return replace(op, after=tuple(key for key in op.after if [key.kind, key.target] != edge))

    assert any(cut(op) != op for op in ranks[0].step(1)), "there is such an edge"
    report = broken(ranks, lambda _, ops: [cut(op) for op in ops])
    assert {fault.kind for fault in report.faults} == {"race"}
    # Whoever reads over names both ops.
    assert all("micro-batch" in fault.message and "buffer" in fault.message for fault in report.faults)


# ---- ops that are missing, doubled, or somewhere else


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


def moved(ops: list[Op], key: Key, before: Key) -> list[Op]:
    """The list with an op, which then waits for nothing, in front of another."""
    (op,) = [op for op in ops if op.key == key]
    rest = [other for other in ops if other.key != key]
    place = next(index for index, other in enumerate(rest) if other.key == before)
    return [*rest[:place], replace(op, after=()), *rest[place:]]


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


@pytest.mark.parametrize("name", ["zero 0", "zero 1", "hybrid", "sum", "bfloat16"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_bucket_that_is_reduced_twice_is_found(name: str, micro_batches: int) -> None:
    ranks = job(RIGHT[name])

    def again(_: int, ops: list[Op]) -> list[Op]:
        place, op = next((i, op) for i, op in enumerate(ops) if op.stream == "reduce" and op.target == "bucket 0")
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


def test_groups_of_a_wrong_mesh_lose_gradients() -> None:
    class Crossed(Schedule):
        @cached_property
        def groups(self):
            return {**super().groups, "reduce": "replicate", "replicate": "shard"}

    ranks = [Crossed(r.layout, r.strategy, 4, r.rank, r.order) for r in job(RIGHT["hybrid"])]
    found(check(ranks), "gradients", "reduce_scatter of bucket 0", "leaves this rank another shard than its own")


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


@pytest.mark.parametrize("name", ["zero 0", "zero 2", "hybrid", "sum", "parameter server"])
@pytest.mark.parametrize("whose", [(0, 1, 2, 3), (3,)])
def test_a_wrong_scale_is_found(name: str, whose: tuple[int, ...]) -> None:
    class Scaled(Schedule):
        @property
        def scale(self) -> float:
            return super().scale / 2

    ranks = [
        (Scaled if r.rank in whose else Schedule)(r.layout, r.strategy, 4, r.rank, r.order) for r in job(RIGHT[name])
    ]
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


def test_what_peers_cannot_reach_is_found() -> None:
    ranks = job(RIGHT["zero 1"])

    def elsewhere(_: int, ops: list[Op]) -> list[Op]:
        place = next(i for i, op in enumerate(ops) if op.kind == "reduce_scatter")
        reads = tuple(span._replace(buffer="parameters 0") for span in ops[place].reads)
        ops[place] = replace(ops[place], reads=reads, writes=reads)
        return ops

    found(broken(ranks, elsewhere), "size", "'parameters 0', which peers cannot reach on stream reduce")


def test_a_parameter_in_no_bucket_is_found() -> None:
    ranks = job(RIGHT["zero 0"])
    layout = replace(ranks[0].layout, buckets=ranks[0].layout.buckets[1:])
    ranks = all_ranks(layout, RIGHT["zero 0"], 4, UNITS)
    found(check(ranks), "gradients", "parameter u4.w is in no bucket: nothing would update it")


def test_what_is_wrong_is_raised_line_by_line() -> None:
    ranks = job(RIGHT["zero 0"])
    report = broken(ranks, lambda _, ops: without(ops, key_of(ops, "copy_in", "u2")))
    with pytest.raises(ScheduleError, match=r"rank 0: all_reduce of bucket 2 \(micro-batch 0, backward\) finds in"):
        report.require()
    assert ROOT not in str(report.to_dict())
