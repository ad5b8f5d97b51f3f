"""Where the time of recorded steps went, rank by rank, and which rank the others stood still for. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from paceline.core.events import Event
from paceline.core.straggler import costliest
from paceline.report.clocks import Offset, aligned, offsets
from paceline.report.critical_path import Segment, critical_path
from paceline.report.meetings import Groups, Meeting, meetings
from paceline.report.recordings import Recording

Cause = Literal["computing", "what it does between ops", "what it does before its first op, such as getting data"]


@dataclass(frozen=True)
class RankTimes:
    """One rank's part of a step, in seconds.

    Attributes:
        rank: The rank.
        computing: In compute ops, without what it stood still in them.
        exposed: Standing still for collectives.
        waiting: The part of `exposed` in which another rank had not come yet.
        between: Between its first and its last compute op, the rest: Python, clipping, the operating system.
        before: How much later than the first rank's its first op began.
        last: At how many collectives it came last.
        meetings: How many collectives all ranks' events of which are there.
        cost: What the others stood still for it, on average over them.
    """

    rank: int
    computing: float
    exposed: float
    waiting: float
    between: float
    before: float
    last: int
    meetings: int
    cost: float

    @property
    def seconds(self) -> float:
        """All of it but `before`."""
        return self.computing + self.exposed + self.between


class Step:
    """One recorded step, on one clock.

    Attributes:
        recording: As it was written down.
        groups: Who meets whom.
        clocks: Ranks whose clocks differ from the first one's.
        events: In the order of ranks, by the first rank's clock.
        meetings: Its collectives.
    """

    def __init__(self, recording: Recording, groups: Groups) -> None:
        """Aligns clocks.

        Args:
            recording: Of a step.
            groups: Who meets whom.
        """
        self.recording, self.groups = recording, groups
        self.clocks: dict[int, Offset] = offsets(meetings(recording.events, groups))
        self.events: tuple[Event, ...] = aligned(recording.events, self.clocks)
        self.meetings: list[Meeting] = meetings(self.events, groups)

    @property
    def number(self) -> int:
        """How many steps were done with it, as log lines count."""
        return self.recording.step + 1

    @cached_property
    def origin(self) -> float:
        """When its first op began."""
        return min((event.start for event in self.events), default=0.0)

    @cached_property
    def seconds(self) -> float:
        """From the first compute op to the end of the last, over all ranks."""
        ran = [event for event in self.events if event.stream == "compute"]
        return max(event.end for event in ran) - min(event.start for event in ran) if ran else 0.0

    @cached_property
    def path(self) -> list[Segment]:
        """Its critical path."""
        return critical_path(self.events, self.meetings)

    @cached_property
    def ranks(self) -> list[RankTimes]:
        """Where each rank's time went."""
        by_rank: dict[int, list[Event]] = {}
        for event in self.events:
            by_rank.setdefault(event.rank, []).append(event)
        whole = [meeting for meeting in self.meetings if meeting.is_whole]
        waited: dict[int, float] = {}
        cost: dict[int, float] = {}
        for meeting in whole:
            for event in meeting.events:
                stood = meeting.waited(event)
                waited[event.rank] = waited.get(event.rank, 0.0) + stood
                cost[meeting.last.rank] = cost.get(meeting.last.rank, 0.0) + stood / max(1, len(by_rank) - 1)
        last = Counter(meeting.last.rank for meeting in whole)
        found = []
        first = min((e.start for e in self.events if e.stream == "compute"), default=0.0)
        for rank, events in sorted(by_rank.items()):
            ran = [event for event in events if event.stream == "compute"]
            start = min((event.start for event in ran), default=first)
            span = max((event.end for event in ran), default=start) - start
            exposed = sum(event.exposed for event in events if event.stream != "compute")
            between = max(0.0, span - sum(event.seconds for event in ran) - exposed)
            found.append(
                RankTimes(
                    rank=rank,
                    computing=max(0.0, span - exposed - between),
                    exposed=min(exposed, span),
                    waiting=waited.get(rank, 0.0),
                    between=between,
                    before=start - first,
                    last=last[rank],
                    meetings=len(whole),
                    cost=cost.get(rank, 0.0),
                )
            )
        return found


@dataclass(frozen=True)
class Straggler:
    """A rank that the others stand still for.

    Attributes:
        rank: The rank.
        steps: In how many steps the others stood still longest for it.
        last: At which share of all collectives it came last.
        cost: Seconds of a step that another rank stands still for it, in the middle of all steps.
        of_step: The same as a share of the step.
        cause: What takes it longer than the others.
    """

    rank: int
    steps: int
    last: float
    cost: float
    of_step: float
    cause: Cause


def mean_times(steps: Sequence[Step]) -> list[RankTimes]:
    """Each rank's times, on average over steps; how often it came last, summed up."""
    by_rank: dict[int, list[RankTimes]] = {}
    for step in steps:
        for times in step.ranks:
            by_rank.setdefault(times.rank, []).append(times)
    return [
        RankTimes(
            rank=rank,
            **{
                name: statistics.fmean(getattr(times, name) for times in each)
                for name in ("computing", "exposed", "waiting", "between", "before", "cost")
            },
            last=sum(times.last for times in each),
            meetings=sum(times.meetings for times in each),
        )
        for rank, each in sorted(by_rank.items())
    ]


def met(steps: Sequence[Step], name: Callable[[Meeting], str]) -> dict[str, list[tuple[float, Meeting]]]:
    """The collectives of steps by a name of theirs, in the order in which they begin, without those that have none.

    Each comes with its part in what a rank does in a step, on average over steps and ranks: that of the ranks which
    take part in it.
    """
    found: dict[str, list[tuple[float, Meeting]]] = {}
    for step in steps:
        world = len({rank for meeting in step.meetings for rank in meeting.ranks})
        for meeting in step.meetings:
            if called := name(meeting):
                part = len(meeting.ranks) / world / len(steps)
                found.setdefault(called, []).append((part, meeting))
    return found


def straggler(steps: Sequence[Step]) -> Straggler | None:
    """The rank that the others stand still for: in so many of the steps that it is no chance, and not for nothing."""
    met = [step for step in steps if any(times.meetings for times in step.ranks)]
    times = mean_times(met)
    if len(times) < 2:
        return None
    seconds = statistics.median(step.seconds for step in met)
    found = costliest([{each.rank: each.cost for each in step.ranks} for step in met], seconds)
    if found is None:
        return None
    slow = next(each for each in times if each.rank == found.rank)
    more: dict[Cause, float] = {
        "computing": _longer(met, slow.rank, lambda times: times.computing),
        "what it does between ops": _longer(met, slow.rank, lambda times: times.between),
        "what it does before its first op, such as getting data": _longer(met, slow.rank, lambda times: times.before),
    }
    cause = max(more, key=lambda cause: more[cause])
    return Straggler(found.rank, found.steps, slow.last / slow.meetings, found.cost, found.cost / seconds, cause)


def _longer(steps: Sequence[Step], rank: int, part: Callable[[RankTimes], float]) -> float:
    """How much longer a part of a step takes a rank than the others: in the middle of steps, as single ones stall."""
    found = []
    for step in steps:
        times = {each.rank: part(each) for each in step.ranks}
        if rank in times and len(times) > 1:
            found.append(times.pop(rank) - statistics.median(times.values()))
    return statistics.median(found)
