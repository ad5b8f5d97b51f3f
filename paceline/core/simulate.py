"""Simulates a schedule: the same events as a run's, from the cost of each op instead of a clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.events import Event
from paceline.core.ops import COMPUTE, PREVIOUS, STREAMS, Key, Op
from paceline.core.schedule import Schedule

Costs = Callable[[Op], float]
"""Seconds that an op takes once it runs: alone on its link; what computes, while nothing is communicated beside it."""

Links = Callable[[Op], str]
"""The link that a collective's bytes go over, such as the wires between hosts."""

Weights = Callable[[Op], float]
"""For which share of its time a collective is in computing's way: less than 1 where it waits for wires."""


@dataclass(frozen=True)
class Timeline:
    """When the ops of some steps run, one after another: the ops of the first step, then those of the second ...

    Attributes:
        ops: Of one step.
        starts: Seconds from the start of the first step.
        ends: The same.
        exposed: Seconds of each that the compute stream stands still for it.
    """

    ops: Sequence[Op]
    starts: Sequence[float]
    ends: Sequence[float]
    exposed: Sequence[float]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.starts) // len(self.ops)

    def computed(self, step: int) -> float:
        """When the compute ops of a step are over; 0 for the one before the first."""
        first = step * len(self.ops)
        return max((self.ends[first + i] for i, op in enumerate(self.ops) if op.kind in COMPUTE), default=0.0) * (
            step >= 0
        )

    @property
    def last_step(self) -> float:
        """Seconds from the end of the last but one step's computing to that of the last's: a step among many."""
        return self.computed(self.steps - 1) - self.computed(self.steps - 2)


def simulate(
    schedule: Schedule,
    costs: Costs,
    micro_batches: int = 1,
    steps: int = 1,
    contention: float = 0.0,
    links: Links | None = None,
) -> list[Event]:
    """Predicts the events of a rank's optimizer steps.

    Ops of one stream run one after another in the order of the schedule; each starts when its stream is free, all
    ops that it comes after are complete, and the compute ops of the step before are over. How far ahead parameters are
    gathered is bounded by the schedule's slots, as a gather comes after what held its slot. A collective is exposed for
    as long as the compute stream stands still for it. Pure: nothing is run.

    Args:
        schedule: The ops.
        costs: Seconds of each op, such as `plan.costs.step_costs` gives them.
        micro_batches: Micro-batches of a step.
        steps: Number of steps; in the first, nothing is left over from a step before.
        contention: By which share computing is slower while any collective is under way, as both take the memory's
            bandwidth, and on CPUs cores: 0.1 makes 1 s of computing take 1.1 s where it is so throughout.
        links: Names what each collective's bytes go over. Of two collectives over one link the one that stands later in
            the schedule moves when the link is free, so that together they take what they would one after another.
            None: they do not share.

    Returns:
        One event per op, in the order of the schedule. Times are seconds from the start of the first step.

    Raises:
        ValueError: An op comes after one that stands nowhere before it.
    """
    line = timeline(schedule.step(micro_batches), costs, micro_batches, steps, contention, links)
    ops, rank = line.ops, schedule.rank
    times = zip(line.starts, line.ends, line.exposed, strict=True)
    return [
        Event(
            *(op.kind, op.target, op.micro_batch, op.phase, op.stream, op.bytes, op.sent, op.received),
            *(index // len(ops), rank, start, end, exposed),
            after=op.after,
        )
        for index, (op, (start, end, exposed)) in enumerate(zip([*ops] * steps, times, strict=True))
    ]


def timeline(
    ops: Sequence[Op],
    costs: Costs,
    micro_batches: int,
    steps: int = 1,
    contention: float = 0.0,
    links: Links | None = None,
    weights: Weights = lambda op: 1.0,
) -> Timeline:
    """`simulate` without making events of it: `ops` are those of a step of so many micro-batches.

    `contention` holds for collectives of weight 1; others slow computing down for as much less.

    Raises:
        ValueError: An op comes after one that stands nowhere before it.
    """
    seconds = [costs(op) for op in ops]
    streams = [STREAMS.index(op.stream) for op in ops]
    computes = [op.kind in COMPUTE for op in ops]
    waits = _waits(ops, micro_batches)
    count = len(ops)
    starts, ends, exposed = [0.0] * (steps * count), [0.0] * (steps * count), [0.0] * (steps * count)
    free = [0.0] * len(STREAMS)
    computed = 0.0
    busy: list[tuple[float, float, float]] = []
    lost = contention / (1 + contention)
    used: dict[str, list[tuple[float, float]]] = {}
    over = [links(op) if links and op.kind not in COMPUTE else "" for op in ops]
    for first in range(0, steps * count, count):
        for index in range(count):
            stream, at = streams[index], first + index
            start = free[stream]
            if start < computed:
                start = computed
            for other in waits[index]:
                # Those of the step before have negative places.
                other += first
                if other < 0:
                    continue
                end = ends[other]
                if end > start:
                    if computes[index] and streams[other % count]:
                        exposed[other] += end - start
                    start = end
            end = start + seconds[index]
            if seconds[index] and contention and computes[index]:
                busy = [span for span in busy if span[1] > start]
                end = _beside(start, seconds[index], busy)
            if seconds[index] and not computes[index]:
                if over[index]:
                    end = _claim(used.setdefault(over[index], []), start, seconds[index])
                if contention:
                    busy.append((start, end, lost * weights(ops[index])))
            starts[at], ends[at] = start, end
            free[stream] = end
        computed = free[0]
    return Timeline(ops, starts, ends, exposed)


def _waits(ops: Sequence[Op], micro_batches: int) -> list[list[int]]:
    """The places of what each op comes after, counted from its step's first op."""
    places: dict[Key, int] = {op.key: index - len(ops) for index, op in enumerate(ops)}
    found: list[list[int]] = []
    done: dict[Key, int] = {}
    for index, op in enumerate(ops):
        mine: list[int] = []
        for key in op.after:
            if key.micro_batch == PREVIOUS:
                place = places.get(key._replace(micro_batch=micro_batches - 1))
            else:
                place = done.get(key)
            if place is None:
                raise ValueError(f"{op.key} comes after {key}, which no op before it is")
            mine.append(place)
        found.append(mine)
        done[op.key] = index
    return found


def _beside(start: float, seconds: float, busy: Sequence[tuple[float, float, float]]) -> float:
    """When computing is over that takes so many seconds alone, of which `busy` spans lose a share each."""
    now, left = start, seconds
    for first, last, lost in sorted(busy):
        if last <= now:
            continue
        if first > now:
            if left <= first - now:
                break
            left -= first - now
            now = first
        done = (last - now) * (1 - lost)
        if left <= done:
            return now + left / (1 - lost)
        left -= done
        now = last
    return now + left


def _claim(taken: list[tuple[float, float]], start: float, seconds: float) -> float:
    """When a collective is over that needs a link for so many seconds, of which spans are taken: in order, apart.

    It is added to them.
    """
    place = bisect_left(taken, (start,))
    if place and taken[place - 1][1] > start:
        place -= 1
    stop, now, left = place, start, seconds
    while stop < len(taken):
        first, last = taken[stop]
        if first > now:
            if left <= first - now:
                break
            left -= first - now
        now = last
        stop += 1
    end = now + left
    first = min(start, taken[place][0]) if stop > place else start
    taken[place:stop] = [(first, end)]
    return end
