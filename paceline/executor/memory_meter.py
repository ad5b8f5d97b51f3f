"""The memory that this rank holds, read at every op that is recorded."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable

import torch

_SECONDS = 0.02
"""Between two looks at what is resident: steps of some milliseconds have as many ops as those of seconds."""


def reader(device: torch.device) -> Callable[[], int]:
    """Returns a function that reads the bytes held: of a GPU's memory as torch's allocator counts it, else resident.

    It gives 0 where that is not known. What is resident is at most `_SECONDS` old.
    """
    if device.type == "cuda":
        return functools.partial(torch.cuda.memory_allocated, device)
    return _now_and_then(_resident) if sys.platform.startswith("linux") else lambda: 0


def _now_and_then(read: Callable[[], int]) -> Callable[[], int]:
    known, due = 0, 0.0

    def latest() -> int:
        nonlocal known, due
        if (now := time.perf_counter()) >= due:
            # In the middle of a step a call into the kernel takes ten times as long as by itself.
            known, due = read(), now + _SECONDS
        return known

    return latest


def _resident() -> int:
    # Its second number counts pages (proc(5)).
    return int(os.pread(_statm(os.getpid()), 64, 0).split(b" ", 2)[1]) * _page()


@functools.cache
def _statm(process: int) -> int:
    """The file that counts pages, open for as long as this process is there; a fork has one of its own."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


@functools.cache
def _page() -> int:
    return os.sysconf("SC_PAGE_SIZE")
