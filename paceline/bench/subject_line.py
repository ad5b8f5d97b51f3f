"""What a benchmark is about, while it runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from paceline.launch.screen import CLEAR, columns
from paceline.launch.status_line import FREE_COLUMNS


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows what is being done on stderr: in one line on a terminal, else a line whenever the subject changes.

    Nothing is drawn in between: a thread that did would take part in what is measured.

    Yields:
        A function to call with "subject: detail", or with "" to clear the line.
    """
    last = ""

    def report(text: str) -> None:
        nonlocal last
        width = columns(sys.stderr)
        if width is not None:
            print(CLEAR + text[: width - FREE_COLUMNS], end="", file=sys.stderr, flush=True)
        elif text and text.split(":")[0] != last:
            last = text.split(":")[0]
            print(last, file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        report("")
