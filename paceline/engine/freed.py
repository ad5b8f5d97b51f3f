"""Memory of the host that was freed."""

from __future__ import annotations

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Gives what was freed back to the system, where the C library kept it for later: glibc's `malloc_trim`.

    The model as it was built is freed by then, and the rank that keeps that memory holds what others could use.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
