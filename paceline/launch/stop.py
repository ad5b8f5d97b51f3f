"""Ctrl-C and SIGTERM: wishes that the training loop grants after the step it is in."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

STOPPING = "\nstopping after this step (again: end at once)"
STOPPABLE = "PACELINE_STOPPABLE_FILE"
"""Names the file by which a worker tells the launcher that it grants stops now."""
TOGETHER_SECONDS = 0.05
"""Requests so close are one: `timeout` sends its signal to a process and then to its group."""
TORCHRUN_SECONDS = 1.0
"""The same under torchrun, which passes on to its workers an interrupt that they had from the terminal already."""


class Requests:
    """The stop signals that came.

    Attributes:
        first: The first of them, None while none has come.
        again: Whether another one followed, so that what goes on is to be ended at once.
    """

    def __init__(self, together: float = TOGETHER_SECONDS) -> None:
        self.first: signal.Signals | None = None
        self.again = False
        self._together, self._at = together, 0.0

    def add(self, number: int) -> None:
        """Takes one in; may be called by a signal handler."""
        now = time.monotonic()
        if self.first is None:
            self.first, self._at = signal.Signals(number), now
        elif now - self._at > self._together:
            self.again = True


class StopRequest:
    """While entered, SIGINT and SIGTERM are remembered instead of ending the process; a second one ends it at once.

    It may be entered again inside, as by each of several jobs. Paceline's own launcher is told that this process grants
    stops, and kills it itself when a second one comes.
    """

    def __init__(self) -> None:
        self._requests = Requests(TORCHRUN_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else TOGETHER_SECONDS)
        self._previous: dict[signal.Signals, Any] = {}
        self._launched = bool({"PACELINE_RENDEZVOUS", STOPPABLE} & os.environ.keys())
        self._depth = 0

    @property
    def received(self) -> int:
        """The first signal that came, 0 while none has."""
        return self._requests.first or 0

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth > 1:
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._remember)
        if (file := os.environ.pop(STOPPABLE, None)) is not None:
            with contextlib.suppress(OSError):
                Path(file).touch()
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def flags(self) -> tuple[int, int]:
        """(1, 0) after SIGINT, (0, 1) after SIGTERM, else (0, 0): what ranks add up to agree on a stop."""
        return int(self.received == signal.SIGINT), int(self.received == signal.SIGTERM)

    def _remember(self, number: int, _: FrameType | None) -> None:
        known = bool(self.received)
        self._requests.add(number)
        if self._requests.again and not self._launched:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        # The launcher says so itself, and it alone knows whether a rank failed.
        if not known and not self._launched and os.environ.get("RANK", "0") == "0":
            os.write(2, f"{STOPPING}\n".encode())


@contextlib.contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Inside, `handler` takes the signals of these numbers. In the main thread."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


@contextlib.contextmanager
def ended_at_once() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM end the process, also where native code waits and Python's handlers cannot run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handled_by(signal.SIG_DFL, signal.SIGINT, signal.SIGTERM):
        yield


def exit_status(interrupts: float, terminations: float) -> int:
    """The shell's status for a stop on which ranks agreed: 130 for Ctrl-C, 143 for SIGTERM, 0 for none.

    Args:
        interrupts: Sum over ranks of the first flag.
        terminations: Sum over ranks of the second flag.
    """
    if terminations:
        return 128 + signal.SIGTERM
    return 128 + signal.SIGINT if interrupts else 0
