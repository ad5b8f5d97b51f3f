"""Memory of the host that was freed: kept for what is allocated next, or given back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's `mallopt` (malloc.h)."""
_LARGEST_MAPPED_APART = 32 << 20
"""Bytes from which on a tensor is always mapped for itself: the most that glibc takes."""
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Has the C library keep what is freed, for what is allocated next: glibc's `mallopt`.

    Every step frees its activations and allocates as many again. By default the top of the heap goes back to the kernel
    as sizes happen to fall, which then gives zeroed pages one by one: measured, up to 6,400 of them in a step, 8 of 92
    ms. What the environment says of malloc stays.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_MAPPED_APART)
        libc.mallopt(_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """Gives what was freed back to the system, where the C library kept it for later: glibc's `malloc_trim`.

    The tensors that a model was built with are freed when it is laid out anew, and would stay with the rank otherwise:
    measured, 5 to 45 MiB more than the schedule says for a model of 54 MiB (tests/engine/test_peak.py).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def forget_memory() -> None:
    """Gives back all that nobody uses, and counts the most that this process has held from now on (proc(5)).

    After work that is over, of which what comes next is told apart.
    """
    gc.collect()
    return_freed_memory()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
