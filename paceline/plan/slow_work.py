"""Lines that tell how far something is that takes long, where somebody listens."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

FIRST = 5.0
"""Seconds until the first line; each further one takes twice as long to come."""

_listener: ContextVar[Callable[[str], object] | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def told_to(report: Callable[[str], object]) -> Iterator[None]:
    """While its block runs, what takes long in it tells `report` how far it is, from another thread."""
    former = _listener.set(report)
    try:
        yield
    finally:
        _listener.reset(former)


@contextlib.contextmanager
def told_while_slow(describe: Callable[[], str], first: float | None = None) -> Iterator[None]:
    """While its block runs, says every now and then how far it is. What is over soon says nothing.

    Args:
        describe: Says how far it is, from another thread.
        first: Seconds until the first time; `FIRST` by default.
    """
    report = _listener.get()
    if report is None:
        yield
        return
    over = threading.Event()

    def tell() -> None:
        pause = FIRST if first is None else first
        while not over.wait(pause):
            with contextlib.suppress(OSError):  # nobody reads it any more
                report(describe())
            pause *= 2

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
