"""Records of executed ops, kept until somebody reads them: marks become seconds only then."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paceline.comm.gpu_streams import CudaClock
from paceline.comm.streams import HostClock, Mark, Pending
from paceline.core.events import Event
from paceline.core.ops import Op

KEPT = 1 << 14
"""Ops remembered where nobody reads, so that memory stays bounded."""
MOST_OPS = 1 << 17
"""Ops remembered where `pl.record` asks for all."""


@dataclass(slots=True)
class Record:
    """An executed op; its marks are there if it `is_timed`."""

    op: Op
    step: int
    is_timed: bool
    start: Mark = None
    end: Mark = None
    pending: Pending | None = None
    waits: tuple[Mark, Mark] | None = None
    memory: int = 0

    @property
    def words(self) -> str:
        """See `whereabouts.Activity`."""
        return f"{self.op.kind} of {self.op.target}"

    @property
    def has_ended(self) -> bool:
        """See `whereabouts.Activity`."""
        return self.end is not None

    @property
    def since(self) -> float | None:
        """See `whereabouts.Activity`."""
        mark = self.start if self.end is None else self.end
        return mark if isinstance(mark, float) else None

    @property
    def finished(self) -> bool:
        """Whether all of its marks are there."""
        return self.end is not None if self.pending is None else self.waits is not None


class Records:
    """The records of one rank.

    Attributes:
        kept: The latest, in the order of their start.
    """

    def __init__(self, rank: int, clock: HostClock | CudaClock) -> None:
        """There are none yet.

        Args:
            rank: Written into events.
            clock: Made the marks.
        """
        self._rank, self._clock = rank, clock
        self.kept: deque[Record] = deque(maxlen=KEPT)

    def keep(self, most: int = KEPT) -> None:
        """From now on so many of the latest are kept."""
        self.kept = deque(self.kept, most)

    def drain(self) -> list[Event]:
        """The events of all that are finished, which are then forgotten."""
        records = list(self.kept)
        self.kept.clear()
        self.kept.extend(record for record in records if not record.finished)
        return [self._event(record) for record in records if record.finished]

    def _event(self, record: Record) -> Event:
        op, pending, seconds = record.op, record.pending, self._clock.seconds
        start, end = (pending.start, pending.end) if pending else (record.start, record.end)
        sent, received = pending.traffic if pending else (0, 0)
        exposed = seconds(record.waits[1]) - seconds(record.waits[0]) if record.waits else 0.0
        return Event(
            *(op.kind, op.target, op.micro_batch, op.phase, op.stream, op.bytes, sent, received),
            *(record.step, self._rank, seconds(start), seconds(end), exposed, op.planned),
            memory=record.memory,
            after=op.after,
        )
