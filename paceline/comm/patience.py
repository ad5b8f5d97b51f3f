"""How long a rank waits for one that is silent: less where steps are known to be short.

A rank that was stopped, or whose machine is gone, closes no connection: others can only wait. They cannot tell it from
one that has more to do, so `pl.init(timeout=...)` is long. Between steps of a training that takes milliseconds each,
a minute is long too: `StepPatience` lowers the limit there, and lifts it for whatever is no step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from paceline.comm.transport import CommunicationError

SHORTEST_SECONDS = 60.0
"""However short the steps: a machine may be busy with something else, or a disk slow, for a while."""
TIMES_THE_SLOWEST = 100.0
_FROZEN_SECONDS = 1.0
"""Between two looks at a peer that are meant to follow at once: what is longer was spent stopped, or asleep."""

_limit = math.inf
_why_broken: Callable[[], str] = str


def end_waits_when(why_broken: Callable[[], str]) -> None:
    """From now on, who waits for other ranks asks this now and then, and waits no more once it gives a reason.

    Args:
        why_broken: Why they will not answer; empty while they may. Called by any thread.
    """
    global _why_broken
    _why_broken = why_broken


def require_unbroken() -> None:
    """Refuses to compute on what other ranks will not answer to.

    Raises:
        CommunicationError: They will not; says why.
    """
    if why := _why_broken():
        raise CommunicationError(why)


def limit(timeout: float) -> float:
    """Seconds after which a silent peer is given up now, at most `timeout`."""
    return min(timeout, _limit)


class Silence:
    """How long a peer has been silent, in time that this process ran: a frozen container freezes all its ranks."""

    def __init__(self, timeout: float) -> None:
        """Begins now.

        Args:
            timeout: Most seconds of silence; see `limit`.
        """
        self._timeout = timeout
        self.end()

    def end(self) -> None:
        """The peer was heard of."""
        self._seconds, self._looked = 0.0, time.monotonic()

    def left(self) -> float:
        """Seconds until the peer is given up; to be asked at least every second.

        Raises:
            CommunicationError: It is known that it will not answer.
        """
        require_unbroken()
        now = time.monotonic()
        self._seconds += min(now - self._looked, _FROZEN_SECONDS)
        self._looked = now
        return limit(self._timeout) - self._seconds


class StepPatience:
    """Between steps, lets silent peers be given up after 100 times the slowest so far, but not before 60 s.

    It counts for this process. Every rank must tell of its steps, and of what is none, in the same places.
    """

    def __init__(self, given: bool = False) -> None:
        """Changes nothing yet.

        Args:
            given: Whether somebody chose a limit, which then holds.
        """
        self._slowest = 0.0
        self._began: float | None = None
        self._given = given

    def step(self) -> None:
        """A step ended, and another follows."""
        global _limit
        now = time.monotonic()
        if self._began is not None:
            self._slowest = max(self._slowest, now - self._began)
            if not self._given:
                _limit = max(SHORTEST_SECONDS, TIMES_THE_SLOWEST * self._slowest)
        self._began = now

    def pause(self) -> None:
        """Something else follows, such as a validation, or weights that one rank saves while others go on."""
        global _limit
        self._began, _limit = None, math.inf
