"""The ops of a schedule that a rank is through with, and the collectives that may be launched now. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from paceline.core.ops import COMPUTE, Key, Op


class Progress:
    """A rank's place in the ops of a step that were loaded so far.

    A collective may be launched when all that it comes after is done and those before it on its stream are launched.
    Compute ops that a rank skips, or runs in another order, count as done where a later collective is waited for and at
    the end: other ranks may run them, and wait for the same collectives.
    """

    def __init__(self, of_step_before: Collection[Key] = ()) -> None:
        """Knows of no op yet.

        Args:
            of_step_before: What the step before leaves to be waited for.
        """
        self._of_step_before = of_step_before
        self._queues: dict[str, deque[Op]] = {}
        self._known: dict[Key, Op] = {}
        self._done: set[Key] = set()
        self._skipped: set[Key] = set()
        """Ops that count as done and have not run, but may yet."""
        self._to_compute: list[Key] = []
        """Of compute ops that were loaded or admitted since everything was skipped."""

    def begin_step(self) -> None:
        """Forgets all ops; everything was launched."""
        self._done.clear()
        self._skipped.clear()
        self._known.clear()
        self._to_compute.clear()

    def load(self, ops: Iterable[Op]) -> None:
        """Takes the next ops of the step."""
        for op in ops:
            self._done.discard(op.key)
            self._known[op.key] = op
            if op.kind in COMPUTE:
                self._to_compute.append(op.key)
            else:
                self._queues.setdefault(op.stream, deque()).append(op)

    def admit(self, op: Op) -> None:
        """Takes an op of a schedule's part that data asked for."""
        self._known[op.key] = op
        if op.kind in COMPUTE:
            self._to_compute.append(op.key)

    def knows(self, key: Key) -> bool:
        """Whether an op of that name was loaded in this step."""
        return key in self._known

    def get(self, key: Key) -> Op:
        """The op of that name.

        Raises:
            RuntimeError: None was loaded in this step.
        """
        op = self._known.get(key)
        if op is None:
            raise RuntimeError(f"{key} is in no schedule that was loaded")
        return op

    def begin(self, key: Key) -> Op:
        """A compute op begins: returns it, as planned or, where it runs once more, as not.

        Raises:
            RuntimeError: It is not in what was loaded.
        """
        op = self.get(key)
        if key in self._skipped:
            self._skipped.remove(key)
        elif key in self._done:
            # A second forward of a unit in one micro-batch, say.
            return replace(op, planned=False)
        return op

    def done(self, *keys: Key) -> None:
        """These compute ops are complete.

        Raises:
            RuntimeError: One is not in what was loaded.
        """
        for key in keys:
            self._done.add(self.get(key).key)

    def ready(self) -> Iterator[Op]:
        """Collectives that may be launched now, in order on each stream; each counts as done once the next is asked."""
        progressed = True
        while progressed:
            # A collective may wait for one on another stream, which it then follows on that one's completion.
            progressed = False
            for queue in self._queues.values():
                while queue and self._done.issuperset(queue[0].after):
                    op = queue.popleft()
                    progressed = True
                    yield op
                    self._done.add(op.key)

    def needed(self, key: Key) -> Op | None:
        """The collective of that name if it has yet to be launched; None if it was, or is of the step before.

        Raises:
            RuntimeError: It is neither loaded nor of the step before, or a compute op that has not run.
        """
        if key in self._done:
            return None
        if key in self._of_step_before:
            # What is left of it is under way; the rest is complete.
            return None
        op = self.get(key)
        if op.kind in COMPUTE:
            raise RuntimeError(f"{key} is waited for, but has not run")
        return op

    def skip(self, stream: str, last: Key | None = None) -> None:
        """Counts compute ops that what is left on a stream comes after as done.

        Args:
            stream: Its name.
            last: The collective with which to stop; None: all.
        """
        for op in tuple(self._queues.get(stream, ())):
            for key in op.after:
                if key in self._done:
                    continue
                if (other := self._known[key]).kind in COMPUTE:
                    self._done.add(key)
                    self._skipped.add(key)
                else:
                    self.skip(other.stream, key)
            if op.key == last:
                break

    def skip_streams(self) -> None:
        """As `skip`, of all streams."""
        for stream in self._queues:
            self.skip(stream)

    def skip_all(self) -> None:
        """Counts all compute ops as done."""
        self._done.update(self._to_compute)
        self._to_compute.clear()

    def drop(self, stream: str) -> None:
        """Forgets what is left on a stream: the model runs its units in an order that the schedule did not foresee."""
        self._queues.pop(stream, None)

    def require_empty(self) -> None:
        """Refuses to end with collectives that nothing launches.

        Raises:
            RuntimeError: There are some.
        """
        if any(self._queues.values()):
            raise RuntimeError(f"collectives that nothing launches: {self._queues}")
