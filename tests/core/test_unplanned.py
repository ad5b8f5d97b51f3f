"""Schedules that only data asks for: all ranks run the same collectives in them, in the buffers that there are."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import HealthCheck, given, settings

from paceline.core.check.spans import check_sizes
from paceline.core.ops import COMPUTE, Op
from paceline.core.schedule import Schedule
from tests.core.broken import several
from tests.drawn import jobs
from tests.quick import examples


def unplanned(rank: Schedule) -> Iterator[tuple[str, tuple[Op, ...]]]:
    """Each by its name, as a rank runs it in the first micro-batch."""
    yield "extra_forward", rank.extra_forward()
    yield "gather_kept_again", rank.gather_kept_again()
    yield "gather_update_again", rank.gather_update_again()
    for unit in rank.gathered_buckets:
        yield f"gather_again of {unit}", rank.gather_again(unit, 0, "backward")
    if rank.shards_parameters:
        yield "meet", (rank.meet("some place", "backward"),)
        for bucket in rank.layout.buckets:
            yield f"gather_pinned of {bucket.name}", (rank.gather_pinned(bucket, "forward"),)
    if rank.world_size > 1:
        for bucket in rank.reduced_buckets:
            yield f"reduce_again of {bucket.name}", rank.reduce_again(bucket, 0)
        yield "send_buffers", (rank.send_buffers(0, "update", 40),)
        yield "sum_numbers", (rank.sum_numbers("some", 0, "update", 3),)
    for unit in rank.computed_units:
        yield f"unforeseen of {unit}", (rank.unforeseen("forward", unit, 0), rank.unforeseen("backward", unit, 0))
    yield "lone_update", rank.lone_update(0)
    yield "update_around_passes", rank.update_around_passes(0)


@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck), deadline=None)
@given(jobs(several))
def test_ranks_issue_the_same_collectives_among_the_ranks_of_their_streams(ranks: list[Schedule]) -> None:
    of_each = [dict(unplanned(rank)) for rank in ranks]
    for name, ops in of_each[0].items():
        for rank, found in zip(ranks, of_each, strict=True):
            told = [(op.key, op.stream, op.group, op.bytes, op.after) for op in found[name]]
            assert told == [(op.key, op.stream, op.group, op.bytes, op.after) for op in ops], name
            assert all(op.group == rank.groups[op.stream] for op in found[name] if op.kind not in COMPUTE), name


@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck), deadline=None)
@given(jobs(several))
def test_they_lie_in_the_buffers_and_are_told_from_what_is_planned(ranks: list[Schedule]) -> None:
    for number, rank in enumerate(ranks):
        for name, ops in unplanned(rank):
            assert not any(op.planned for op in ops), name
            # What has memory of its own besides says nothing of that.
            sized = [op for op in ops if op.kind in COMPUTE or (op.reads and op.writes)]
            assert not list(check_sizes(number, rank, sized, 1)), name
            # They wait for nothing but each other: what was planned may have run, or not.
            for place, op in enumerate(ops):
                assert {other.key for other in ops[:place]}.issuperset(op.after), name
