"""Hosts' clocks beside each other, from collectives that nobody leaves before all came. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.core.events import Event
from paceline.report.meetings import JOINT, Meeting

_NOISE = 0.0005
"""Seconds by which a rank of one clock may seem to leave too soon: a GPU's times are read to about that."""


@dataclass(frozen=True)
class Offset:
    """What a rank's clock shows beside the first rank's.

    Attributes:
        seconds: By how much it is ahead.
        spread: Half of the range in which the middle half of the estimates lies, in seconds.
        is_steady: Whether one offset suits every collective; if not, the clock jumped.
    """

    seconds: float
    spread: float
    is_steady: bool


def offsets(meetings: Iterable[Meeting]) -> dict[int, Offset]:
    """The clocks of ranks that differ from the first one's.

    If no rank leaves a collective before another came, clocks agree. If some does, its clock is another host's: the
    offset is then the median of how much later it seems to end collectives, as they end about together.
    """
    pairs: dict[int, dict[int, list[tuple[Event, Event]]]] = {}
    for meeting in meetings:
        if meeting.events[0].kind in JOINT:
            first = meeting.events[0]
            for event in meeting.events[1:]:
                pairs.setdefault(event.rank, {}).setdefault(first.rank, []).append((first, event))
    found: dict[int, Offset] = {}
    for rank, by_first in sorted(pairs.items()):
        # Ranks that meet in several groups are compared with whom they meet most, which may be another host's, too.
        other, together = max(by_first.items(), key=lambda item: len(item[1]))
        known = found.get(other)
        if _agree(together, 0.0):
            if known is not None:
                found[rank] = known
            continue
        apart = [event.end - first.end for first, event in together]
        seconds = statistics.median(apart)
        quarters = statistics.quantiles(apart, n=4) if len(apart) > 1 else [seconds] * 3
        found[rank] = Offset(
            seconds + (known.seconds if known else 0.0), (quarters[2] - quarters[0]) / 2, _agree(together, seconds)
        )
    return found


def aligned(events: Sequence[Event], clocks: dict[int, Offset]) -> tuple[Event, ...]:
    """The events with all times by the first rank's clock."""
    if not clocks:
        return tuple(events)
    shift = {rank: offset.seconds for rank, offset in clocks.items()}
    return tuple(
        replace(event, start=event.start - by, end=event.end - by) if (by := shift.get(event.rank, 0.0)) else event
        for event in events
    )


def _agree(together: Sequence[tuple[Event, Event]], ahead: float) -> bool:
    """Whether, with one clock so far ahead, neither rank leaves before the other has come."""
    return all(
        first.start <= other.end - ahead + _NOISE and other.start - ahead <= first.end + _NOISE
        for first, other in together
    )
