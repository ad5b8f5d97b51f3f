"""What a benchmark is about, while it runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows what is being done on stderr: in one line on a terminal, else a line whenever the subject changes.

    Yields:
        A function to call with "subject: detail", or with "" to clear the line.
    """
    terminal = sys.stderr.isatty()
    last = ""

    def report(text: str) -> None:
        nonlocal last
        if terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif text and text.split(":")[0] != last:
            last = text.split(":")[0]
            print(last, file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        report("")
