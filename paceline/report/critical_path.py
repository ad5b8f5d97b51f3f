"""The chain of ops and pauses that a step's length consists of: each began when the one before it was over. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.events import Event
from paceline.core.ops import COMPUTE, Key
from paceline.report.meetings import JOINT, Meeting

STOOD_STILL = 20e-6
"""Seconds from which a rank stood still for a collective: to find that one is over takes it some, too."""

What = Literal["computing", "communicating", "between ops"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the path.

    Attributes:
        what: What the rank did.
        rank: The rank.
        event: What ran; None between ops.
        start: Seconds, by the events' clock.
        end: The same.
    """

    what: What
    rank: int
    event: Event | None
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


def critical_path(events: Sequence[Event], meetings: Sequence[Meeting]) -> list[Segment]:
    """The path to the end of a step's computing, in the order of time, without a gap.

    It is walked backwards. A compute op began after the one before it on its rank, or after the collective that its
    rank stood still for. A collective ran from when its last rank had come, which came when the op before had ended
    there: of those that it comes `after` where that is known, else of all of its rank.

    Args:
        events: Of one step, on one clock.
        meetings: Its collectives.
    """
    walk = _Walk(events, meetings)
    last = max((event for event in events if event.stream == "compute"), key=lambda event: event.end, default=None)
    return [] if last is None else walk.back_from(last)


class _Walk:
    """Goes from an op to the one that it began after."""

    def __init__(self, events: Sequence[Event], meetings: Sequence[Meeting]) -> None:
        self._meeting = {id(event): meeting for meeting in meetings for event in meeting.events}
        self._of_rank: dict[int, list[Event]] = {}
        for event in sorted(events, key=lambda event: event.end):
            self._of_rank.setdefault(event.rank, []).append(event)
        self._ends = {rank: [event.end for event in of_rank] for rank, of_rank in self._of_rank.items()}

    def back_from(self, event: Event) -> list[Segment]:
        path: list[Segment] = []
        now, done = event.end, set[int]()
        while True:
            done.add(id(event))
            before: Event | None
            if event.kind in COMPUTE:
                before = self._before_compute(event, now, done)
                if before is not None and before.end > event.start:
                    # The rank stood still in the middle of the op.
                    path.append(Segment("computing", event.rank, event, before.end, now))
                    event, now = before, before.end
                    continue
                path.append(Segment("computing", event.rank, event, event.start, now))
            else:
                meeting = self._meeting.get(id(event))
                if meeting is not None and event.kind in JOINT and meeting.came < now:
                    path.append(Segment("communicating", event.rank, event, meeting.came, now))
                    event = meeting.last
                else:
                    path.append(Segment("communicating", event.rank, event, event.start, now))
                before = self._before_collective(event, done)
            now = event.start
            if before is None:
                return path[::-1]
            if before.end < now:
                path.append(Segment("between ops", event.rank, None, before.end, now))
            event, now = before, before.end

    def _before_compute(self, event: Event, now: float, done: set[int]) -> Event | None:
        """The collective that the rank stood still for last, or the op before if that is later."""
        for other in self._until(event.rank, now):
            if id(other) in done:
                continue
            if other.kind in COMPUTE and other.end <= event.start:
                return other
            if other.kind not in COMPUTE and other.exposed > STOOD_STILL:
                return other
        return None

    def _before_collective(self, event: Event, done: set[int]) -> Event | None:
        for other in self._until(event.rank, event.start):
            if id(other) in done:
                continue
            name = Key(other.kind, other.target, other.micro_batch, other.phase)
            if event.after is None or other.stream == event.stream or name in event.after:
                return other
        return None

    def _until(self, rank: int, now: float) -> Iterator[Event]:
        """Events of a rank that ended by then, the latest first."""
        for index in range(bisect_right(self._ends[rank], now) - 1, -1, -1):
            yield self._of_rank[rank][index]
