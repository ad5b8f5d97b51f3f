"""Who waited for whom in a step, as arrows between its ops. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.core.events import Event
from paceline.report.critical_path import STOOD_STILL
from paceline.report.meetings import Groups, meetings

_WITHIN = 1e-6
"""Seconds before an op's end, which itself belongs to what comes next on its stream."""


@dataclass(frozen=True)
class Flow:
    """An op that another one waited for.

    Attributes:
        name: What was waited for.
        source: The op that was waited for.
        left: When, within it, in seconds.
        target: The op that waited.
        arrived: When, within it, not before `left`.
    """

    name: str
    source: Event
    left: float
    target: Event
    arrived: float


def flows(events: Sequence[Event], groups: Groups) -> Iterator[Flow]:
    """The arrows of a step: from who came last at a collective to the others, and from collectives to computing.

    Args:
        events: Of one step, of ranks that share a clock.
        groups: Who meets whom.
    """
    for meeting in meetings(events, groups):
        last = meeting.last
        for other in meeting.events:
            left, arrived = last.start, _just_before_the_end(other)
            if other is not last and min(last.seconds, other.seconds) > 0 and arrived >= left:
                yield Flow("came last", last, left, other, arrived)
    computed: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda event: event.start):
        if event.stream == "compute" and event.seconds > 0:
            computed.setdefault(event.rank, []).append(event)
    for event in events:
        if event.stream != "compute" and event.exposed > STOOD_STILL and event.seconds > 0:
            later = computed.get(event.rank, [])
            if (index := bisect_left(later, event.end, key=lambda op: op.start)) < len(later):
                yield Flow("stood still for", event, _just_before_the_end(event), later[index], later[index].start)


def _just_before_the_end(event: Event) -> float:
    return event.end - min(_WITHIN, event.seconds / 2)
