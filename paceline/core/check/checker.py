"""Every rank's schedule side by side, proved without a process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from paceline.core.build_schedule import build_schedule
from paceline.core.check.busy_step import busy_step, lone_step, step_around_passes
from paceline.core.check.contents import contents_faults
from paceline.core.check.facts import Facts
from paceline.core.check.order import happens_before, races, shared_races
from paceline.core.check.report import Fault, Report, uses
from paceline.core.check.sequences import Sequences
from paceline.core.check.spans import Accesses, check_sizes
from paceline.core.layout import Layout
from paceline.core.memory import memory
from paceline.core.ops import COMPUTE, Op, Span
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy


def check(schedules: Sequence[Schedule], micro_batches: int = 1) -> Report:
    """Proves two steps of all ranks as planned, then each of those that are not, or says what would go wrong in them.

    - Ranks of a group issue the same collectives in the same order, of the same size and scale, and get through them.
    - Of every two ops on one part of a buffer, one of which writes, one is over before the other starts, however long
      each takes; where ranks share memory, between ranks too.
    - What an op reads is there: a unit's own parameters as the last update left them, the gradients of the micro-batch.
    - The gradient of every rank and micro-batch reaches the update of every parameter once, scaled as the strategy
      says; all ranks compute the next step with every parameter as it was updated.
    - Spans lie in their buffers, and collectives are of the size of what they move.

    What ops do to memory is as they say. Besides the planned step there are one with all that a step's data may ask for
    (see `busy_step`), one whose passes an optimizer runs inside its own step, and one without a backward.

    Args:
        schedules: One of each rank, in the order of ranks.
        micro_batches: Micro-batches of a step.

    Returns:
        What was looked at, and the faults: none for a schedule that is right.
    """
    report = check_steps(schedules, [schedule.step(micro_batches) for schedule in schedules], micro_batches)
    if report.faults:
        return report
    busy = [busy_step(schedule, micro_batches) for schedule in schedules]
    around = [step_around_passes(schedule, micro_batches) for schedule in schedules]
    lone = [lone_step(schedule) for schedule in schedules]
    return replace(
        report,
        unplanned=sum(not op.planned for op in (*busy[0], *around[0], *lone[0])),
        faults=check_steps(schedules, busy, micro_batches).faults
        or check_steps(schedules, around, micro_batches, agree=True).faults
        or check_steps(schedules, lone, 0).faults,
    )


def all_ranks(
    layout: Layout,
    strategy: Strategy,
    world_size: int,
    order: Sequence[str],
    deferred: Iterable[str] = (),
    statistics: int = 1,
) -> list[Schedule]:
    """The schedules of every rank.

    Args:
        layout: Of the model, for this strategy and number of ranks.
        strategy: How it is shared.
        world_size: Number of ranks.
        order: Units that run, in the order of the forward pass.
        deferred: Units whose gradients come after the whole backward.
        statistics: How many numbers the ranks agree on.
    """
    ranks = range(world_size)
    return [build_schedule(layout, strategy, world_size, rank, order, deferred, statistics) for rank in ranks]


def check_steps(
    schedules: Sequence[Schedule], steps: Sequence[tuple[Op, ...]], micro_batches: int, agree: bool = False
) -> Report:
    """`check` of steps that may be others than the schedules', or without a backward: of no micro-batch.

    Where ranks `agree` that gradients are there, and nothing reads parameters after that, it keeps them from writing to
    parameters that they share before all have read them, as a barrier does.
    """
    sequences = Sequences(schedules, steps, micro_batches)
    faults, pairs, kinds = list(_check_layout(schedules[0])), 0, _same_spans(steps)
    sequences.check_names()
    faults += sequences.faults
    for rank in dict.fromkeys(kinds):
        faults += check_sizes(rank, schedules[rank], steps[rank], micro_batches)
    if not faults:
        facts = _facts(schedules, steps, kinds, micro_batches)
        masks = {rank: happens_before(steps[rank], sequences) for rank in sorted(set(sequences.kind_of))}
        for rank in dict.fromkeys(kinds):
            found, wrong = races(rank, steps[rank], facts[rank].accesses, masks[sequences.kind_of[rank]])
            pairs += found
            faults += wrong
        touched = {rank: facts[rank].accesses for rank in range(len(schedules))}
        faults += _check_shared(
            schedules, steps, touched, {r: masks[k] for r, k in enumerate(sequences.kind_of)}, agree
        )
        faults += contents_faults(facts, sequences.rounds(), micro_batches)
        faults += sequences.faults
    return Report(
        ranks=len(schedules),
        kinds=len(set(kinds)),
        micro_batches=micro_batches,
        ops=len(steps[0]),
        collectives=sum(op.kind not in COMPUTE for op in steps[0]),
        pairs=pairs,
        sent=max(sum(op.sent for op in ops) for ops in steps),
        memory=memory(schedules[0], micro_batches),
        buffers=uses(schedules[0].buffers(micro_batches), steps[0]),
        faults=tuple(faults),
    )


def _same_spans(steps: Sequence[tuple[Op, ...]]) -> list[int]:
    """For each rank, the first whose ops are its own, but for the bytes that each sends."""
    seen: dict[tuple[object, ...], int] = {}
    return [
        seen.setdefault(tuple((op.key, op.stream, op.after, op.bytes, op.reads, op.writes) for op in ops), rank)
        for rank, ops in enumerate(steps)
    ]


def _facts(
    schedules: Sequence[Schedule], steps: Sequence[tuple[Op, ...]], kinds: Sequence[int], micro_batches: int
) -> list[Facts]:
    names = {buffer.name for buffer in schedules[0].buffers(micro_batches) if buffer.shared}
    shared: set[Span] = set()
    if names:
        # Cut alike on all ranks.
        for schedule, ops in zip(schedules, steps, strict=True):
            shared |= {span for op in ops for span in (*op.reads, *op.writes) if span.buffer in names}
            shared |= {schedule.buffers(micro_batches).shard(bucket) for bucket in schedule.layout.buckets}
    found: dict[tuple[int, int], Facts] = {}
    result: list[Facts] = []
    for rank, kind in enumerate(kinds):
        key = (kind, schedules[rank].shard_index)
        if key not in found:
            found[key] = Facts(schedules[rank], steps[rank], micro_batches, shared)
        result.append(found[key])
    return result


def _check_shared(
    schedules: Sequence[Schedule],
    steps: Sequence[tuple[Op, ...]],
    touched: dict[int, Accesses],
    masks: dict[int, list[int]],
    agree: bool,
) -> Iterator[Fault]:
    names = frozenset(buffer.name for buffer in schedules[0].buffers() if buffer.shared)
    if names:
        for ranks in schedules[0].ranks_of("shard"):
            yield from shared_races(ranks, steps, touched, masks, names, agree)


def _check_layout(schedule: Schedule) -> Iterator[Fault]:
    """Finds trainable parameters that no bucket or more than one holds, and places that overlap."""
    layout = schedule.layout
    held: dict[int, str] = {}
    for bucket in layout.buckets:
        if bucket.numel % schedule.shards:
            yield Fault("size", 0, None, f"bucket {bucket.name} is not cut into {schedule.shards} equal shards")
        for index in bucket.slots:
            slot = layout.slots[index]
            inside = slot.flat == bucket.flat and bucket.start <= slot.offset <= slot.stop <= bucket.stop
            if index in held or not inside:
                where = (
                    f"{held[index]} and {bucket.name}" if index in held else f"{bucket.name}, outside of which it lies"
                )
                yield Fault("size", 0, None, f"parameter {slot.spec.name} is in bucket {where}")
            held[index] = bucket.name
    for index, slot in enumerate(layout.slots):
        if slot.spec.trainable and slot.spec.numel and index not in held:
            yield Fault("gradients", 0, None, f"parameter {slot.spec.name} is in no bucket: nothing would update it")
    places = sorted((slot.flat, slot.offset, slot.stop, slot.spec.name) for slot in layout.slots if slot.spec.numel)
    for (flat, _, stop, name), (next_flat, start, _, next_name) in pairwise(places):
        if flat == next_flat and start < stop:
            yield Fault("size", 0, None, f"parameters {name} and {next_name} lie on each other")
