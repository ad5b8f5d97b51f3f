"""Where ranks meet: each collective of a step, who came to it last, and what that cost. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from paceline.core.errors import UserError
from paceline.core.events import Event
from paceline.core.mesh import REPLICATE, SHARD, Mesh
from paceline.core.ops import COMPUTE
from paceline.core.strategy import Strategy

Groups = Callable[[Event], tuple[int, ...]]
"""The ranks that an event's collective runs over."""

JOINT = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})
"""Collectives that no rank leaves before all have come."""


@dataclass(frozen=True)
class Meeting:
    """One collective.

    Attributes:
        ranks: Those that it runs over.
        events: Of those ranks whose events are there, in the order of ranks.
    """

    ranks: tuple[int, ...]
    events: tuple[Event, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every rank's event is there, of more than one."""
        return len(self.ranks) == len(self.events) > 1

    @cached_property
    def last(self) -> Event:
        """The event of the rank that came last."""
        return max(self.events, key=lambda event: event.start)

    @cached_property
    def came(self) -> float:
        """When all had come."""
        return self.last.start

    @property
    def late(self) -> float:
        """Seconds by which the last came after the one before it; 0 of a rank that is alone."""
        first, *others = sorted((event.start for event in self.events), reverse=True)
        return first - others[0] if others else 0.0

    @cached_property
    def seconds(self) -> float:
        """From when all had come to when the last has done: what the collective itself took."""
        return max(0.0, max(event.end for event in self.events) - self.came)

    def waited(self, event: Event) -> float:
        """Seconds in which the rank of one of the events computed nothing because another had not come yet."""
        return max(0.0, min(self.came, event.end) - max(event.start, event.end - event.exposed))

    @cached_property
    def algorithm_bandwidth(self) -> float | None:
        """Bytes of the buffer per second; None where that cannot be told."""
        size = max(event.bytes for event in self.events)
        return size / self.seconds if self.is_whole and self.seconds > 0 and size else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes per second over each rank's link that an algorithm which moves no byte twice would have needed."""
        return None if self.algorithm_bandwidth is None else self.algorithm_bandwidth * self.share

    @property
    def share(self) -> float:
        """Bytes that a rank has to send at least, as a share of the buffer's; of the server's peers, or it, all."""
        n, kind = len(self.ranks), self.events[0].kind
        return {"all_reduce": 2 * (n - 1) / n, "all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n}.get(kind, 1.0)


def groups_of(strategy: Strategy | None, world_size: int) -> Groups:
    """Who meets whom: by the strategy's mesh, or all ranks where that is not known or has no place for so many."""
    everyone = tuple(range(world_size))
    try:
        shards = world_size if strategy is None or world_size == 1 else strategy.shards(world_size)
    except UserError:
        # Lines of a rank that no run wrote, or another run's settings.
        shards = world_size
    if not 1 < shards < world_size:
        return lambda event: everyone
    mesh = Mesh(((REPLICATE, world_size // shards), (SHARD, shards)))
    along = {"gather": (SHARD,), "reduce": (SHARD,), "replicate": (REPLICATE,)}
    return lambda event: mesh.group(event.rank, along.get(event.stream, mesh.names))


def meetings(events: Iterable[Event], groups: Groups) -> list[Meeting]:
    """The collectives among events of one step, in the order in which they began."""
    found: dict[tuple[object, ...], list[Event]] = {}
    ranks: dict[tuple[object, ...], tuple[int, ...]] = {}
    for event in events:
        if event.kind not in COMPUTE and event.planned:
            group = groups(event)
            key = (event.kind, event.target, event.micro_batch, event.phase, event.stream, group)
            found.setdefault(key, []).append(event)
            ranks[key] = group
    met = [Meeting(ranks[key], tuple(sorted(each, key=lambda e: e.rank))) for key, each in found.items()]
    return sorted(met, key=lambda meeting: meeting.came)
