"""The events of a step: one for each op, measured by the engine or predicted by a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from paceline.core.ops import Key


@dataclass(frozen=True, slots=True)
class Event:
    """One executed op, as `pl.engine_of(model).drain_events()` lists them.

    The first fields are those of `Op`, but `sent` and `received` are counted where the bytes move, not copied from the
    schedule.

    Attributes:
        kind: What it does, such as forward, all_gather or update.
        target: What it does that to: the name of a unit or a bucket, or what else an op of that kind has.
        micro_batch: Number within the step, from 0; -2 for a pass that is no part of a step.
        phase: Part of the step: forward, backward or update.
        stream: What it runs on; ops on one stream run one after another.
        bytes: Size of the buffer that is communicated; 0 for what computes.
        sent: Bytes that this rank sent.
        received: Bytes that this rank received.
        step: Optimizer step, from 0.
        rank: The rank that the op ran on.
        start: Seconds on the host's monotonic clock, which ranks of one host share.
        end: The same, when it was over.
        exposed: Seconds of a collective during which computing stood still for it.
        planned: Whether the op is part of every such step, or was added as this step's data asked for it.
        memory: Bytes that the rank held when an op that computes began: on a GPU those that torch's allocator had
            given out, else all that the process holds. 0 where that is not known.
        after: Ops that it came after, besides those before it on its stream, as its `Op` says; None where that is not
            known.
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
    rank: int
    start: float
    end: float
    exposed: float = 0.0
    planned: bool = True
    memory: int = 0
    after: tuple[Key, ...] | None = None

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON-ready values."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        after = values.get("after")
        return cls(**{**values, "after": None if after is None else tuple(Key(*key) for key in after)})


_FIELDS = tuple(field.name for field in fields(Event))


def without_cut_step(events: Iterable[Event]) -> list[Event]:
    """Events without those of the last step, if it had not come to its update."""
    listed = list(events)
    last = max((event.step for event in listed), default=0)
    updated = any(event.step == last and event.kind == "update" for event in listed)
    return [event for event in listed if updated or event.step != last]


def exposed_in_step(events: Iterable[Event], step: int) -> float | None:
    """Share of one step in which a rank computed nothing because it waited for a collective; None without its events.

    What the step before sent at its end is waited for in this one, and counts here.

    Args:
        events: Of one rank: all of this step and the one before that are over when this one's update is.
        step: Its number.
    """
    listed = list(events)
    own = [event for event in listed if event.step == step and event.phase != "update"]
    sent = [event for event in listed if event.step == step - 1 and event.phase == "update"]
    ran = [event for event in listed if event.step == step and event.stream == "compute"]
    if not ran:
        return None
    seconds = max(event.end for event in ran) - min(event.start for event in ran)
    return exposed_fraction([*own, *sent], seconds)


def exposed_fraction(events: Iterable[Event], seconds: float) -> float:
    """Share of `seconds` (a wall time) in which one rank computed nothing because it waited for a collective.

    Args:
        events: Events of one rank.
        seconds: The wall time that they span, such as the time of the steps they belong to.
    """
    return sum(event.exposed for event in events) / seconds if seconds > 0 else 0.0
