"""What workers that do not have the screen write to stderr, shown line by line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO

from paceline.launch.screen import show


class WorkerOutput:
    """One worker's stderr."""

    def __init__(self, stream: IO[bytes], name: Callable[[], str]) -> None:
        """Shows nothing yet.

        Args:
            stream: The pipe's end; it never waits from now on.
            name: What stands before each line.
        """
        self._stream, self._name = stream, name
        self._partial = b""
        os.set_blocking(stream.fileno(), False)

    def forward(self) -> bool:
        """Shows the lines that are there; False when there will be no more."""
        try:
            data = os.read(self._stream.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data and self._partial:
            lines.append(self._partial)
        for line in lines:
            show(f"[{self._name()}] {line.decode(errors='replace')}", warning=True)
        return bool(data)
