"""Progress of long work: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str], None]

REDRAW_SECONDS = 0.1
LINE_SECONDS = 5.0


@contextmanager
def progress(label: str, total: int | None, report: Report | None) -> Iterator[Callable[[int], None]]:
    """Show how far work over bytes has come.

    Args:
        label: what is being done.
        total: bytes of work, or None if unknown.
        report: receives lines where there is no terminal; None shows nothing at all.

    Yields:
        A function to call with the number of bytes done since the last call.
    """
    if report is None:
        yield lambda count: None
        return
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            pass
        else:
            columns = (TextColumn(label), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(label, total=total)
                yield _every(REDRAW_SECONDS, lambda done: bar.update(task, completed=done))
            return
    started = time.monotonic()
    yield _every(LINE_SECONDS, lambda done: report(_line(label, done, total, time.monotonic() - started)))


def size_text(count: float) -> str:
    """A number of bytes for people: 12100000 -> '12.1 MB' (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _every(seconds: float, show: Callable[[int], None]) -> Callable[[int], None]:
    """A counter that shows its sum, but not more often than every `seconds`."""
    done = 0
    due = time.monotonic() + seconds

    def advance(count: int) -> None:
        nonlocal done, due
        done += count
        if time.monotonic() >= due:
            show(done)
            due = time.monotonic() + seconds

    return advance


def _line(label: str, done: int, total: int | None, seconds: float) -> str:
    if total is None or done == 0:
        return f"{label}: {size_text(done)}"
    left = seconds * max(total - done, 0) / done
    return f"{label}: {size_text(done)} of {size_text(total)} ({100 * done / total:.0f} %), {left:.0f} s left"
