"""What happened: one event per op, measured by the engine or predicted by a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Event:
    """One executed op.

    The first fields are those of `schedule.Op`, but `sent` and `received` are counted where the bytes move,
    not copied from the schedule.
    """

    kind: str
    target: str
    micro_batch: int
    phase: str
    stream: str
    bytes: int
    sent: int
    received: int
    step: int
    """Optimizer step, from 0."""
    rank: int
    start: float
    """Seconds on the host's monotonic clock, which ranks of one host share."""
    end: float
    exposed: float = 0.0
    """Seconds of a collective during which computing stood still for it."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return cls(**values)


def exposed_fraction(events: Iterable[Event], seconds: float) -> float:
    """Share of `seconds` (a wall time) in which one rank computed nothing because it waited for a collective.

    Args:
        events: Events of one rank.
        seconds: The wall time that they span, such as the time of the steps they belong to.
    """
    return sum(event.exposed for event in events) / seconds if seconds > 0 else 0.0
