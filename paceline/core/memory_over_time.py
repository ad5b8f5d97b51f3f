"""The memory of a rank while the ops of a step run, executed or simulated. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from paceline.core.events import Event

Moments = list[tuple[float, int]]
"""Seconds from which on so many bytes are held."""


def memory_over_time(
    events: Iterable[Event], held: int, kept: Mapping[str, int], during: Callable[[Event], int]
) -> Moments:
    """Bytes over time.

    Args:
        events: Of one rank, such as `simulate` gives them.
        held: Bytes that are there all the time: the schedule's buffers.
        kept: By unit, bytes of activations from the start of its forward to the end of its backward.
        during: Bytes that an op needs beside that while it runs.

    Returns:
        Each change, in order: when, and what is held from then on.
    """
    changes: dict[float, int] = defaultdict(int)
    for event in events:
        beside = during(event)
        changes[event.start] += beside
        changes[event.end] -= beside
        if event.kind == "forward":
            changes[event.start] += kept.get(event.target, 0)
        elif event.kind == "backward":
            changes[event.end] -= kept.get(event.target, 0)
    moments: Moments = []
    for when in sorted(changes):
        held += changes[when]
        if not moments or moments[-1][1] != held:
            moments.append((when, held))
    return moments
