"""Interprets a schedule: launches each collective when what it waits for is done, and records every op."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from paceline.comm.plan import Traffic
from paceline.comm.streams import CommStream, CudaClock, HostClock, Mark, Pending
from paceline.events import Event
from paceline.schedule import COMPUTE, Key, Op

_KEPT = 1 << 14
"""Ops remembered where nobody drains the events, so that memory stays bounded."""


@dataclass(slots=True)
class _Record:
    """An executed op whose marks are turned into seconds when it is read."""

    op: Op
    step: int
    start: Mark = None
    end: Mark = None
    pending: Pending | None = None
    waits: tuple[Mark, Mark] | None = None

    @property
    def finished(self) -> bool:
        return self.end is not None if self.pending is None else self.waits is not None


class Executor:
    """Runs the ops of a schedule in two kinds of places.

    Compute ops run in the caller (autograd, the optimizer), which tells when they begin and end. Collectives
    are launched from here, in schedule order on each stream, as soon as the compute ops they wait for are done.
    """

    def __init__(
        self,
        rank: int,
        clock: HostClock | CudaClock,
        streams: Mapping[str, CommStream],
        work: Callable[[Op], Callable[[], Traffic]],
    ) -> None:
        """Creates an idle executor.

        Args:
            rank: Written into events.
            clock: Makes marks on the compute stream.
            streams: Streams for collectives, by the name that ops give them.
            work: Gives the function that performs a collective.
        """
        self._rank = rank
        self._clock = clock
        self._streams = streams
        self._work = work
        self._records: deque[_Record] = deque(maxlen=_KEPT)
        self._running: _Record | None = None
        self._queues: dict[str, deque[Op]] = {}
        self._done: set[Key] = set()
        self._compute: dict[Key, Op] = {}
        self._launched: list[_Record] = []
        self._step = 0

    def load(self, step: int, ops: Iterable[Op]) -> None:
        """Takes the next ops of step `step`; those loaded before must have been finished."""
        if step != self._step:
            self._step = step
            self._done.clear()
            self._compute.clear()
        for op in ops:
            if op.kind in COMPUTE:
                self._compute[op.key] = op
            else:
                self._queues.setdefault(op.stream, deque()).append(op)

    def begin(self, key: Key) -> None:
        """A compute op begins; the one that was running ends."""
        self.end()
        op = self._compute.get(key)
        if op is None:
            op = Op(key.kind, key.target, key.micro_batch, "compute")  # type: ignore[arg-type]
        self._running = _Record(op, self._step, self._clock.now())
        self._records.append(self._running)

    def end(self) -> None:
        """The running compute op, if any, ends."""
        if self._running is not None:
            self._running.end = self._clock.now()
            self._running = None

    def done(self, keys: Iterable[Key]) -> None:
        """These compute ops are complete, their results in place: launches the collectives that waited for them."""
        self._done.update(keys)
        for name, queue in self._queues.items():
            while queue and all(key in self._done for key in queue[0].after):
                op = queue.popleft()
                self._launch(op, self._streams[name], self._work(op))

    def complete(self) -> None:
        """Launches whatever is left, then waits for every collective launched; the time of that is exposed.

        Raises:
            CommunicationError: A collective failed.
            RuntimeError: A collective waits for an op that is not in what was loaded.
        """
        self.end()
        self.done(self._compute)
        if any(self._queues.values()):
            raise RuntimeError(f"collectives that nothing launches: {self._queues}")
        for record in self._launched:
            assert record.pending is not None
            start = self._clock.now()
            self._streams[record.op.stream].wait(record.pending)
            record.waits = (start, self._clock.now())
        self._launched.clear()

    def run(self, op: Op, work: Callable[[], Traffic]) -> None:
        """Runs one collective that no schedule foresaw, and waits for it."""
        self._launch(op, self._streams[op.stream], work)
        self.complete()

    def drain(self) -> list[Event]:
        """The events of all ops completed since the last call, in order of their start on each stream."""
        records, self._records = self._records, deque(maxlen=_KEPT)
        self._records.extend(record for record in records if not record.finished)
        events = [self._event(record) for record in records if record.finished]
        self._clock.refresh()
        return events

    def _launch(self, op: Op, stream: CommStream, work: Callable[[], Traffic]) -> None:
        record = _Record(op, self._step)
        record.pending = stream.submit(work, op.target)
        self._launched.append(record)
        self._records.append(record)
        self._done.add(op.key)

    def _event(self, record: _Record) -> Event:
        op, pending, seconds = record.op, record.pending, self._clock.seconds
        start, end = (pending.start, pending.end) if pending else (record.start, record.end)
        sent, received = pending.traffic if pending else (0, 0)
        exposed = seconds(record.waits[1]) - seconds(record.waits[0]) if record.waits else 0.0
        return Event(
            op.kind,
            op.target,
            op.micro_batch,
            op.stream,
            op.bytes,
            sent,
            received,
            record.step,
            self._rank,
            seconds(start),
            seconds(end),
            exposed,
        )
