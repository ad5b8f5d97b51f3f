"""The steps whose events a run wrote down: found in its file, chosen where they are too many, read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.command_line import quantities as said
from paceline.core.events import Event
from paceline.core.ops import STREAMS, Key
from paceline.report.lines import Damage, Line, read_lines

_DECODER = msgspec.json.Decoder(Event)
LARGE = 64 << 20
"""Bytes of an events.jsonl that are read from end to end: about 300,000 events."""
_MOST_RANKS = 1 << 20
"""More than any job has: a line of such a rank is damaged."""
_SPREAD = 64
"""Steps that are looked at in a larger one, as far as they have no more bytes together."""


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


class Found(NamedTuple):
    """What was found in an events.jsonl.

    Attributes:
        places: Of steps that count, in order: of one that was done again, the last time.
        is_whole: Whether the file was read from end to end.
    """

    places: list[Place]
    is_whole: bool


def find_recordings(path: Path, damage: Damage, most_bytes: int = LARGE) -> Found:
    """Where the steps lie in an events.jsonl.

    Reads line by line, so that a file may be larger than memory. Of a large one it reads steps that are spread over it,
    and the last ones, so that it takes no longer for a larger one.

    Args:
        path: The file; none is an empty one.
        damage: Counts lines that are no event.
        most_bytes: A file with more is large.
    """
    size = path.stat().st_size if path.is_file() else 0
    if size <= most_bytes:
        return Found(_by_step(_places(path, damage)), True)
    first = next(_places(path, damage), None)
    if first is None:
        # There is no event up to the end of it.
        return Found([], True)
    found, length = [first], first.stop - first.start
    places, left = max(1, min(_SPREAD, most_bytes // (2 * length))), most_bytes
    for part in range(1, places):
        # Where it begins to read may be in the middle of a step.
        begin = max(found[-1].stop, size * part // places)
        found += islice(_places(path, damage, begin), 1, 2)
        left -= found[-1].stop - begin
        if left < 0:
            break
    stop, begin = found[-1].stop, max(found[-1].stop, size - 3 * length)
    found += islice(_places(path, damage, begin), 0 if begin == stop else 1, None)
    return Found(_by_step(found), begin == first.stop)


def _by_step(places: Iterable[Place]) -> list[Place]:
    found: list[Place] = []
    for place in places:
        # A run that went back did again what it had done since: that does not count.
        while found and found[-1].step >= place.step:
            found.pop()
        found.append(place)
    return found


def _places(path: Path, damage: Damage, start: int = 0) -> Iterator[Place]:
    """Each step's, from some byte of the file on; the first is in part where that is not its first."""
    place: Place | None = None
    last, seen = -1, set[Key]()
    for line in _events(path, damage, start):
        event = line.value
        key = Key(event.kind, event.target, event.micro_batch, event.phase)
        # A step's events are written rank by rank, and a planned op is done once.
        goes_on = place is not None and place.step == event.step and event.rank >= last
        if goes_on and event.rank == last and event.planned and key in seen:
            goes_on = False
        if place is None or not goes_on:
            if place is not None:
                yield place
            place = Place(event.step, line.start, line.stop)
            seen.clear()
        elif event.rank != last:
            seen.clear()
        last = event.rank
        seen.add(key)
        place.stop = line.stop
        place.events[event.rank] += 1
        if event.stream == "compute":
            begin, end = place.spans.get(event.rank, (math.inf, -math.inf))
            place.spans[event.rank] = min(begin, event.start), max(end, event.end)
    if place is not None:
        yield place


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


def read_recordings(path: Path, found: Found, most: int, problems: list[str]) -> list[Recording]:
    """The events of some steps: of all, unless these have too many.

    Args:
        path: The file.
        found: What is in it.
        most: How many events to read, about.
        problems: Says there what is left out.
    """
    places, chosen = found.places, choose(found.places, most)
    count = sum(place.count for place in places)
    if not found.is_whole:
        size = path.stat().st_size
        about = float(f"{size * count / sum(place.stop - place.start for place in places):.2g}")
        problems.append(
            f"{path.name} has {said.size(size)}, about {about:,.0f} events: of its steps {len(places):,} were looked "
            f"at, spread over the run, and {len(chosen)} of these are shown. What the page says of events, and which "
            "steps are the typical one and the slowest, is about those."
        )
    elif len(chosen) < len(places):
        problems.append(
            f"The run recorded {count:,} events of {len(places):,} steps. To keep the page small, it shows "
            f"{len(chosen)} of these steps: the typical one, the slowest, and others spread over the run. What it says "
            "of events is about those."
        )
    return [read_recording(path, place, most) for place in chosen]


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
        is_sound = event.stream in STREAMS and 0 <= event.rank < _MOST_RANKS and 0 <= event.step < 1 << 53
        if is_sound and all(map(math.isfinite, times)) and event.seconds >= 0:
            yield line
        else:
            damage.lines += 1
