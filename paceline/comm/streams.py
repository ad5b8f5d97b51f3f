"""Streams on which collectives run beside computing, in the order in which they were submitted."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.comm.living import Living
from paceline.comm.transport import CommunicationError, explain
from paceline.core.collectives.rounds import Traffic

_CLOSING_SECONDS = 5.0
_LOOK_SECONDS = 0.005

Mark = Any
"""A point in time: seconds on the host (CPU), or a recorded CUDA event (GPU)."""


class Done:
    """Whether something is over, once and for good: a lock that is let go of then, as events take ten times as long."""

    __slots__ = ("_under_way",)

    def __init__(self) -> None:
        """It is not."""
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def is_set(self) -> bool:
        """Whether it is over, as far as can be told without waiting."""
        return not self._under_way.locked()

    def set(self) -> None:
        """It is over."""
        self._under_way.release()

    def wait(self) -> None:
        """Returns when it is over."""
        with self._under_way:
            pass


_NOTHING = Traffic(0, 0)


@dataclass(slots=True)
class Pending:
    """A submitted collective."""

    label: str
    start: Mark = None
    end: Mark = None
    traffic: Traffic = _NOTHING
    error: BaseException | None = None
    done: Done = field(default_factory=Done)


class CommStream(Protocol):
    """Runs collectives one after another, concurrently with the caller.

    Attributes:
        is_timed: Whether somebody will read when collectives start and end.
    """

    is_timed: bool

    def submit(self, work: Callable[[], Traffic], label: str, after: Sequence[Pending] = ()) -> Pending:
        """Enqueues `work`, which starts when all submitted before it, and `after` on other streams, has finished."""
        ...

    def wait(self, pending: Pending) -> None:
        """Makes what the caller computes next wait for a collective.

        Raises:
            CommunicationError: The collective, or one before it, failed.
        """
        ...

    def close(self) -> bool:
        """Ends the stream; returns whether it has ended."""
        ...

    def abandon(self) -> None:
        """Nobody uses the stream any more; returns at once."""
        ...


_Item = tuple[Callable[[], Traffic], Pending, Sequence[Pending]]


class _StreamThread(threading.Thread):
    """A stream's thread.

    Attributes:
        is_waited_for: Whether another thread waits until a collective of it is complete.
        is_idle: Whether it has nothing to do.
    """

    is_waited_for = False
    is_idle = True


_threads: Living[_StreamThread] = Living()


def is_waited_for() -> bool:
    """Whether the program waits until what this thread does is complete, as it does where it does so itself."""
    thread = threading.current_thread()
    return thread.is_waited_for if isinstance(thread, _StreamThread) else True


def others_idle() -> bool:
    """Whether no stream's thread of this process but the calling one has a collective under way."""
    own = threading.current_thread()
    return all(thread.is_idle or thread is own for thread in _threads)


def wait_for_others(seconds: float) -> None:
    """Waits, at most so long, until they are idle. Peers see that, so that none waits for this rank elsewhere."""
    end = time.monotonic() + seconds
    while not others_idle() and time.monotonic() < end:
        for thread in _threads:
            thread.is_waited_for = not thread.is_idle
        time.sleep(_LOOK_SECONDS)


# A forked child has no streams: weights that are on their way must be there before, as it could not wait for them.
os.register_at_fork(before=lambda: wait_for_others(_CLOSING_SECONDS), after_in_child=_threads.clear)


class ThreadStream:
    """A CPU stream: one thread that executes collectives in order.

    A thread, not asynchronous calls: a collective of several rounds moves on while backward runs, and its
    start and end are known.
    """

    is_timed = True

    def __init__(self, name: str) -> None:
        """Starts the thread."""
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._failure: str | None = None
        self._closed = False
        self._thread = _StreamThread(target=self._run, name=f"paceline {name}", daemon=True)
        _threads.add(self._thread)
        self._thread.start()

    def submit(self, work: Callable[[], Traffic], label: str, after: Sequence[Pending] = ()) -> Pending:
        """Hands `work` to the thread."""
        pending = Pending(label)
        if self._closed:
            raise CommunicationError(f"{label}: the stream that would carry it is closed")
        self._require_rank(label)
        self._thread.is_idle = False
        self._queue.put((work, pending, after))
        return pending

    def wait(self, pending: Pending) -> None:
        """Blocks until a collective is complete; see `CommStream.wait`."""
        if not pending.done.is_set():
            self._require_rank(pending.label)
            self._thread.is_waited_for = True
            pending.done.wait()
            self._thread.is_waited_for = False
        if pending.error is not None:
            if isinstance(pending.error, CommunicationError):
                raise type(pending.error)(str(pending.error)) from pending.error
            raise pending.error

    def _require_rank(self, label: str) -> None:
        if not self._closed and not self._thread.is_alive():
            raise CommunicationError(
                f"{label}: a forked process is no rank, and nobody gathers parameters for it: fork it inside "
                "`with pl.full_parameters(model):`, or give it a copy.deepcopy(model), made on every rank"
            )

    def close(self) -> bool:
        """Lets the thread finish what was submitted, then end; one that waits for a peer in vain is left behind."""
        self._closed = True
        self._queue.put(None)
        if threading.current_thread() is self._thread:
            # The garbage collector ran between two collectives of this thread, which ends next.
            return True
        self._thread.join(_CLOSING_SECONDS)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Lets the thread finish what was submitted, then end."""
        self._closed = True
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._carry_out(*item)
            # A thread's frame is never collected, nor is what it holds while it waits for the next item.
            del item
            self._thread.is_idle = self._queue.empty()
        # What ends the thread may have been in the queue when it was last looked at.
        self._thread.is_idle = True

    def _carry_out(self, work: Callable[[], Traffic], pending: Pending, after: Sequence[Pending]) -> None:
        for other in after:
            other.done.wait()
        pending.start = time.perf_counter()
        try:
            # The ranks no longer agree on what comes next; going on would mix data.
            if self._failure is not None:
                raise CommunicationError(self._failure)
            for other in after:
                if other.error is not None:
                    raise other.error
            pending.traffic = work()
        except BaseException as error:  # handed to the waiting thread
            pending.error = error
            if self._failure is None:
                # In words: the error's traceback holds every frame below, and with them the model.
                self._failure = explain(error)
        pending.end = time.perf_counter()
        pending.done.set()


class HostClock:
    """Marks are seconds of the host's monotonic clock."""

    def now(self, timed: bool = True) -> Mark:
        """A mark."""
        return time.perf_counter()

    def refresh(self) -> None:
        """Nothing to do: the host's clock is the host's clock."""

    def begin_recording(self) -> None:
        """Nothing to do, as in `refresh`."""

    def follow(self) -> None:
        """Nothing to do: a CPU computes in the order in which it is told to."""

    def require_no_capture(self) -> None:
        """Nothing to refuse."""

    def seconds(self, mark: Mark) -> float:
        """The time of a mark, in seconds."""
        return float(mark)
