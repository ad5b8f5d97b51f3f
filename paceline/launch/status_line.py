"""The last line of a terminal, drawn again twice a second while long work goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from paceline.launch.screen import CLEAR, columns

REDRAW_SECONDS = 0.5
FREE_COLUMNS = 3
"""At its end: a full line would begin the next one, also when the terminal writes ^C behind it."""

Text = Callable[[int], str]
"""What the line says now, in at most so many columns."""


class StatusLine:
    """Shows a text on stderr while entered, if that is a terminal.

    A thread draws it, so the work never waits for the terminal. No mode of the terminal is changed: whatever ends
    this process leaves a line of text behind at most.
    """

    def __init__(self, text: Text) -> None:
        """Starts nothing."""
        self._text = text
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if columns(sys.stderr) is not None:
            self._thread = threading.Thread(target=self._redraw, name="status line", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            clear_line()

    @contextmanager
    def showing(self, text: Text) -> Iterator[None]:
        """Inside, the line says something else."""
        former, self._text = self._text, text
        self.draw()
        try:
            yield
        finally:
            self._text = former

    def draw(self) -> None:
        """Draws it now, such as after a line was printed in its place."""
        width = columns(sys.stderr)
        if self._thread is not None and width is not None:
            room = width - FREE_COLUMNS
            _write(CLEAR + self._text(room)[:room])

    def _redraw(self) -> None:
        while not self._ended.wait(REDRAW_SECONDS):
            self.draw()


def clear_line() -> None:
    """Takes away what a status line left on the terminal, in this process or one that is gone."""
    if columns(sys.stderr) is not None:
        _write(CLEAR)


def _write(text: str) -> None:
    try:
        # At once, as other processes write to the same terminal.
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        # A terminal that was closed shows nothing more.
        return
