"""What a schedule would take: the same events as a run's, from the cost of each op instead of a clock."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.events import Event
from paceline.core.ops import COMPUTE, PREVIOUS, Key, Op
from paceline.core.schedule import Schedule

Costs = Callable[[Op], float]
"""Seconds that an op takes once it runs."""


def simulate(schedule: Schedule, costs: Costs, micro_batches: int = 1, steps: int = 1) -> list[Event]:
    """Predicts the events of a rank's optimizer steps.

    Ops of one stream run one after another in the order of the schedule; each starts when its stream is free, all
    ops that it comes after are complete, and the compute ops of the step before are over. A collective is exposed for
    as long as the compute stream stands still for it. Pure: nothing is run.

    Args:
        schedule: The ops.
        costs: Seconds of each op, such as `comm.plan.seconds` for collectives.
        micro_batches: Micro-batches of a step.
        steps: Number of steps; in the first, nothing is left over from a step before.

    Returns:
        One event per op, in the order of the schedule. Times are seconds from the start of the first step.

    Raises:
        ValueError: An op comes after one that stands nowhere before it.
    """
    events: list[Event] = []
    free: dict[str, float] = {}
    ops = schedule.step(micro_batches)
    before: dict[Key, int] = {}
    computed = 0.0
    for step in range(steps):
        done: dict[Key, int] = {}
        for op in ops:
            start = available = max(free.get(op.stream, 0.0), computed)
            waits: list[int] = []
            for key in op.after:
                if key.micro_batch == PREVIOUS:
                    index = before.get(key._replace(micro_batch=micro_batches - 1))
                    if index is None and step == 0:
                        continue
                else:
                    index = done.get(key)
                if index is None:
                    raise ValueError(f"{op.key} comes after {key}, which no op before it is")
                start = max(start, events[index].end)
                if op.kind in COMPUTE and events[index].stream != "compute":
                    waits.append(index)
            _expose(events, waits, available)
            free[op.stream] = start + costs(op)
            done[op.key] = len(events)
            events.append(
                Event(
                    op.kind,
                    op.target,
                    op.micro_batch,
                    op.phase,
                    op.stream,
                    op.bytes,
                    op.sent,
                    op.received,
                    step,
                    schedule.rank,
                    start,
                    free[op.stream],
                )
            )
        before = done
        computed = free.get("compute", 0.0)
    return events


def _expose(events: list[Event], waits: list[int], now: float) -> None:
    """Writes down which collectives the compute stream waits for from `now` on, and how long for each."""
    for index in waits:
        event = events[index]
        if event.end > now:
            exposed = event.exposed + event.end - now
            events[index] = Event(**{**event.to_dict(), "exposed": exposed})
            now = event.end
