"""Interprets a schedule: launches each collective when what it waits for is done, and records every op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from paceline.comm import whereabouts
from paceline.comm.gpu_streams import CudaClock
from paceline.comm.streams import CommStream, HostClock
from paceline.core.collectives.rounds import Traffic
from paceline.core.events import Event
from paceline.core.ops import PREVIOUS, Key, Op
from paceline.core.progress import Progress
from paceline.executor.launch_hash import LaunchHash
from paceline.executor.records import KEPT, Record, Records

_ARRIVE = ("all_gather", "broadcast", "barrier")
"""Kinds of op by which parameters come."""


class Executor:
    """Runs the ops of a schedule, and no others, in two kinds of places.

    Compute ops run in the caller (autograd, the optimizer), which tells when they begin and end, and wait here for
    the collectives that they come after. Collectives are launched from here, in schedule order on each stream, as
    soon as the compute ops they wait for are done.

    Attributes:
        step: Number of the step that was loaded last.
        records: Whether ops are kept to be drained; see `record`.
        launched: Tells the collectives that were launched, for ranks to compare.
    """

    def __init__(
        self,
        rank: int,
        clock: HostClock | CudaClock,
        streams: Mapping[str, CommStream],
        work: Callable[[Op], Callable[[], Traffic]],
        records: bool = True,
        memory: Callable[[], int] = lambda: 0,
        of_step_before: Collection[Key] = (),
    ) -> None:
        """Creates an idle executor.

        Args:
            rank: Written into events.
            clock: Makes marks on the compute stream.
            streams: Streams for collectives, by the name that ops give them.
            work: Gives the function that performs a collective.
            records: Whether to keep what was executed, to be drained.
            memory: Gives the bytes that this rank holds.
            of_step_before: What the step before leaves to be waited for.
        """
        self._clock, self._streams, self._work, self._memory = clock, streams, work, memory
        self._records = Records(rank, clock)
        self._remember = self._records.kept.append
        self._running: Record | None = None
        self._progress = Progress(of_step_before)
        self._outstanding: dict[Key, Record] = {}
        self.launched = LaunchHash()
        self.step = 0
        self.record(records)

    def record(self, on: bool) -> None:
        """Whether ops are kept to be drained, and on a GPU when each ran, from now on."""
        if on:
            self._clock.begin_recording()
        self.records = on
        for stream in self._streams.values():
            stream.is_timed = on

    def keep(self, most: int = KEPT) -> int:
        """From now on so many of the latest ops are kept to be drained; returns how many are now."""
        self._records.keep(most)
        self._remember = self._records.kept.append
        return len(self._records.kept)

    def load(self, step: int, ops: Iterable[Op]) -> None:
        """Takes the next ops of step `step`; collectives that an earlier load left over are launched first.

        Raises:
            EngineError: A CUDA graph is being captured.
        """
        self._clock.require_no_capture()
        progress = self._progress
        progress.skip_streams()
        self._advance()
        if step != self.step:
            self.step = step
            progress.begin_step()
            self._outstanding = {
                key._replace(micro_batch=PREVIOUS): record for key, record in self._outstanding.items()
            }
        progress.load(ops)
        self._advance()

    # ---- compute ops

    def admit(self, op: Op) -> None:
        """Takes a compute op of a schedule's part that data asked for."""
        self._progress.admit(op)

    def begin(self, key: Key) -> None:
        """A compute op begins, once what it waits for is complete; the one that was running ends.

        Raises:
            RuntimeError: It is not in what was loaded.
        """
        self.end()
        self._running = self._begin(key)

    def _begin(self, key: Key) -> Record:
        op = self._progress.begin(key)
        if op.after:
            self.require(op.after)
        records = self.records
        whereabouts.latest = record = Record(op, self.step, records, self._clock.now(records))
        if records:
            record.memory = self._memory()
            self._remember(record)
        return record

    def end(self) -> None:
        """The running compute op, if any, ends."""
        if (running := self._running) is not None:
            running.end = self._clock.now(running.is_timed)
            self._running = None

    def follow(self) -> None:
        """Orders the ops that are computed next, on any stream, after those that were computed before."""
        self._clock.follow()

    def mark(self, key: Key) -> None:
        """A compute op that takes no time begins and is done."""
        self.end()
        record = self._begin(key)
        record.end = record.start
        self.done(key)

    def mark_known(self, key: Key) -> None:
        """`mark`, if the op was loaded in this step."""
        if self.knows(key):
            self.mark(key)

    def done(self, *keys: Key) -> None:
        """These compute ops are complete, their results in place: launches the collectives that waited for them."""
        self._progress.done(*keys)
        self._advance()

    def after(self, key: Key) -> tuple[Key, ...]:
        """Returns the ops that a loaded op waits for."""
        return self._progress.get(key).after

    def knows(self, key: Key) -> bool:
        """Whether an op of this name was loaded in this step."""
        return self._progress.knows(key)

    # ---- waiting

    def require(self, keys: Iterable[Key]) -> None:
        """Waits for ops; a collective not launched yet is, with all before it on its stream.

        Raises:
            RuntimeError: One is neither loaded nor under way nor of the step before.
        """
        for key in keys:
            record = self._outstanding.get(key)
            if record is None and (op := self._progress.needed(key)) is not None:
                self.skip(op.stream, key)
                record = self._outstanding.get(key)
            if record is not None:
                del self._outstanding[key]
                self._wait(record)

    def require_arrived(self, targets: Collection[str]) -> None:
        """Waits for gathers, broadcasts and barriers under way for some targets."""
        self.require(
            [key for key, record in self._outstanding.items() if key.target in targets and record.op.kind in _ARRIVE]
        )

    def wait_beside(self, targets: Collection[str]) -> None:
        """Waits as `require_arrived` does, but in a thread beside the one that computes, and takes note of nothing."""
        for record in list(self._outstanding.values()):
            if record.op.target in targets and record.op.kind in _ARRIVE and record.pending is not None:
                self._streams[record.op.stream].wait(record.pending)

    def require_reduced(self, target: str) -> None:
        """Waits for reductions of a bucket that are under way."""
        self.require(
            [
                key
                for key, record in self._outstanding.items()
                if key.target == target and record.op.stream in ("reduce", "replicate") and key.phase == "backward"
            ]
        )

    def settle_stream(self, stream: str) -> None:
        """Waits for every collective under way on a stream."""
        self.require([key for key, record in self._outstanding.items() if record.op.stream == stream])

    def settle(self) -> None:
        """Waits for every collective under way."""
        self.require(tuple(self._outstanding))

    # ---- launching

    def skip(self, stream: str, last: Key | None = None) -> None:
        """Launches what is left on a stream, up to `last`, as if this rank had run what that comes after."""
        self._progress.skip(stream, last)
        self._advance()

    def drop(self, stream: str) -> None:
        """Forgets what is left on a stream: the model runs its units in an order that the schedule did not foresee."""
        self._progress.drop(stream)

    def skip_all(self) -> None:
        """Launches all collectives that are left, as if every compute op had run.

        Raises:
            RuntimeError: A collective waits for what was not loaded.
        """
        self.end()
        self._progress.skip_all()
        self._advance()
        self._progress.require_empty()

    def complete(self) -> None:
        """Launches the collectives that are left, then waits for all that were launched; that time is exposed.

        Raises:
            CommunicationError: A collective failed.
        """
        self.skip_all()
        self.settle()

    def run(self, ops: Sequence[Op], work: Callable[[], Traffic] | None = None) -> None:
        """Runs collectives of a schedule's part that data asked for, and waits for them.

        Args:
            ops: On one stream.
            work: Performs the only one; by default what performs such ops of a schedule.
        """
        for op in ops:
            self._progress.admit(op)
            self._launch(op, work or self._work(op))
            self._progress.done(op.key)
        self.require([op.key for op in ops])

    def drain(self) -> list[Event]:
        """The events of all recorded ops completed since the last call, in order of their start on each stream."""
        events = self._records.drain()
        if self.records:
            self._clock.refresh()
        return events

    def _advance(self) -> None:
        """Launches collectives whose conditions hold."""
        for op in self._progress.ready():
            self._launch(op, self._work(op), [self._outstanding[k] for k in op.after if k in self._outstanding])

    def _launch(self, op: Op, work: Callable[[], Traffic], after: Sequence[Record] = ()) -> None:
        record = Record(op, self.step, self.records)
        stream = self._streams[op.stream]
        before = [other.pending for other in after if other.pending is not None]
        record.pending = stream.submit(work, op.target, before)
        self._outstanding[op.key] = record
        if self.records:
            self._remember(record)
        self.launched.add(op.stream, op.target)

    def _wait(self, record: Record) -> None:
        assert record.pending is not None
        start = self._clock.now(record.is_timed)
        self._streams[record.op.stream].wait(record.pending)
        record.waits = (start, self._clock.now(record.is_timed))
