"""The steps whose events a run wrote down: found in its file, chosen where they are too many, read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from paceline.core.events import Event
from paceline.core.ops import STREAMS, Key
from paceline.report.lines import Damage, Line, read_lines

_DECODER = msgspec.json.Decoder(Event)


@dataclass
class Place:
    """Where in the file the events of one step lie.

    Attributes:
        step: Its number, from 0.
        start: First byte.
        stop: First byte after it.
        events: How many each rank wrote.
        spans: From each rank's first compute op to the end of its last, by its own clock.
    """

    step: int
    start: int
    stop: int
    events: Counter[int] = field(default_factory=Counter)
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of events."""
        return self.events.total()

    @property
    def seconds(self) -> float:
        """How long the step took the rank that it took longest."""
        return max((end - start for start, end in self.spans.values()), default=0.0)


@dataclass(frozen=True)
class Recording:
    """The events of one step of all ranks.

    Attributes:
        place: Where they come from.
        events: In the order of ranks, and of the start of each op on its stream.
    """

    place: Place
    events: tuple[Event, ...]

    @property
    def step(self) -> int:
        """The step's number, from 0."""
        return self.place.step

    @property
    def world_size(self) -> int:
        """Number of ranks, as far as those that wrote events tell."""
        return max(self.place.events, default=-1) + 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that there are events of."""
        return tuple(sorted({event.rank for event in self.events}))


def find_recordings(path: Path, damage: Damage) -> list[Place]:
    """Where the steps lie in an events.jsonl, in the order of steps; of one that was done again, the last time counts.

    Reads line by line, so that a file may be larger than memory.

    Args:
        path: The file; none is an empty one.
        damage: Counts lines that are no event.
    """
    found: dict[int, Place] = {}
    place: Place | None = None
    last, seen = -1, set[Key]()
    for line in _events(path, damage):
        event = line.value
        key = Key(event.kind, event.target, event.micro_batch, event.phase)
        # A step's events are written rank by rank, and a planned op is done once.
        goes_on = place is not None and place.step == event.step and event.rank >= last
        if goes_on and event.rank == last and event.planned and key in seen:
            goes_on = False
        if place is None or not goes_on:
            place = found[event.step] = Place(event.step, line.start, line.stop)
            seen.clear()
        elif event.rank != last:
            seen.clear()
        last = event.rank
        seen.add(key)
        place.stop = line.stop
        place.events[event.rank] += 1
        if event.stream == "compute":
            start, end = place.spans.get(event.rank, (math.inf, -math.inf))
            place.spans[event.rank] = min(start, event.start), max(end, event.end)
    return [found[step] for step in sorted(found)]


def typical(places: Sequence[Place]) -> Place:
    """The step that took as long as half of them took at most."""
    return sorted(places, key=lambda place: place.seconds)[(len(places) - 1) // 2]


def slowest(places: Sequence[Place]) -> Place:
    """The step that took longest."""
    return max(places, key=lambda place: place.seconds)


def choose(places: Sequence[Place], most: int) -> list[Place]:
    """As many of the steps as have `most` events together, but one at least.

    Typical and slowest come first, then the last and the first, then others spread over the run.
    """
    if not places or sum(place.count for place in places) <= most:
        return list(places)
    spread = (places[len(places) * part // 64] for part in range(64))
    chosen: dict[int, Place] = {}
    left = most
    for place in (typical(places), slowest(places), places[-1], places[0], *spread):
        if place.step not in chosen and (place.count <= left or not chosen):
            chosen[place.step] = place
            left -= place.count
    return [chosen[step] for step in sorted(chosen)]


def read_recording(path: Path, place: Place, most: int) -> Recording:
    """The events of one step.

    Of more than `most`, whole ranks are read that are spread over all of them; of one rank, the first `most` events.
    """
    ranks, count = sorted(place.events), place.count
    if count > most:
        wanted = max(1, len(ranks) * most // count)
        ranks = sorted({ranks[(len(ranks) - 1) * part // max(1, wanted - 1)] for part in range(wanted)})
    kept = set(ranks)
    lines = (line.value for line in _events(path, Damage(), place.start, place.stop) if line.value.rank in kept)
    return Recording(place, tuple(islice(lines, most)))


def _events(path: Path, damage: Damage, start: int = 0, stop: int | None = None) -> Iterator[Line[Event]]:
    for line in read_lines(path, _DECODER, damage, start, stop):
        event = line.value
        times = (event.start, event.end, event.exposed)
        if event.stream in STREAMS and event.rank >= 0 and all(map(math.isfinite, times)) and event.seconds >= 0:
            yield line
        else:
            damage.lines += 1
