"""Schedules that are right pass the check, and an edge is missed exactly where it is needed."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from paceline.core.check import Lifetime, check, lifetimes
from paceline.core.check.sequences import Sequences
from paceline.core.ops import COMPUTE, GRADIENTS, OPTIMIZER, PREVIOUS, READ, STATISTICS, WRITTEN, Key, Op, Span
from paceline.core.parameter_server import ParameterServer
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from tests.core.broken import RIGHT, broken, job, key_of, several
from tests.drawn import jobs, micro_batch_counts
from tests.quick import examples

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
    assert report.kinds == (2 if isinstance(ranks[0], ParameterServer) else ranks[0].shards if own else 1)
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


def test_a_report_has_the_table_of_buffers_with_their_first_and_last_ops() -> None:
    ranks = job(Strategy(zero=3))
    table = check(ranks).require().to_dict()["buffers"]
    assert [row["name"] for row in table] == [buffer.name for buffer in ranks[0].buffers()]
    assert sum(row["bytes"] for row in table) == sum(buffer.bytes for buffer in ranks[0].buffers())
    (slot,) = [row for row in table if row["name"] == "gradient slot 1 float32"]
    assert (slot["kind"], slot["peers"], slot["shared"]) == ("slots", "reduce", False)
    assert slot["written"] == "copy_in of u3 (micro-batch 0, backward)"
    assert slot["read"] == "reduce_scatter of u1 (micro-batch 0, backward)"


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
