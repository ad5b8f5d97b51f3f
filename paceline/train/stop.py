"""Ctrl-C and SIGTERM: wishes that the training loop grants after the step it is in."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, Self

STOPPING = "\nstopping after this step (Ctrl-C again ends at once)"


class StopRequest:
    """While entered, SIGINT and SIGTERM are remembered instead of ending the process.

    A second SIGINT ends it at once, except under a launcher: torchrun passes on to its workers an interrupt that
    they had from the terminal already, and paceline's own launcher kills them itself.

    Attributes:
        received: The first signal that came, 0 while none has.
    """

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._torchrun, self._launched = "TORCHELASTIC_RUN_ID" in os.environ, "PACELINE_RENDEZVOUS" in os.environ

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def flags(self) -> tuple[int, int]:
        """(1, 0) after SIGINT, (0, 1) after SIGTERM, else (0, 0): what ranks add up to agree on a stop."""
        return int(self.received == signal.SIGINT), int(self.received == signal.SIGTERM)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.received:
            if number == signal.SIGINT and not (self._torchrun or self._launched):
                raise KeyboardInterrupt
            return
        self.received = number
        # The launcher says so itself, and it alone knows whether a rank failed.
        if not self._launched and os.environ.get("RANK", "0") == "0":
            os.write(2, f"{STOPPING}\n".encode())


def exit_status(interrupts: float, terminations: float) -> int:
    """The shell's status for a stop on which ranks agreed: 130 for Ctrl-C, 143 for SIGTERM, 0 for none.

    Args:
        interrupts: Sum over ranks of the first flag.
        terminations: Sum over ranks of the second flag.
    """
    if terminations:
        return 128 + signal.SIGTERM
    return 128 + signal.SIGINT if interrupts else 0
