"""Seconds of a call, repeated by every rank of a host at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import paceline as pl
from paceline.calibrate.timed_pass import clock, undisturbed

BEYOND_CACHES = 96 << 20
"""Bytes that are written before a call that should not find its own in the caches."""

_STRETCH = 0.01
"""Seconds for which what is timed alone is repeated: some of the slices in which ranks take turns on a core."""


def least(run: Callable[[], object], repeats: int) -> float:
    """Seconds of a call in the best of several stretches, so long that waiting for a core is in them as in a step.

    Of a call that takes longer than all of them would, the first one is enough.
    """
    pl.barrier()
    began = time.perf_counter()
    run()
    if (first := time.perf_counter() - began) > repeats * _STRETCH:
        return first
    times = []
    for _ in range(repeats):
        calls, began, now = 0, time.perf_counter(), 0.0
        while now < _STRETCH:
            run()
            calls, now = calls + 1, time.perf_counter() - began
        times.append(now / calls)
    return min(times)


def cold(run: Callable[[], object], repeats: int) -> float:
    """Seconds of a call whose memory is out of the caches, where a pass of a model leaves what it does not use."""
    others, now = torch.ones(BEYOND_CACHES // 4), clock()
    pl.barrier()
    run()
    times = []
    for _ in range(repeats):
        others.add_(1)
        began = now()
        run()
        times.append(now() - began)
    return undisturbed(times)
