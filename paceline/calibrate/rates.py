"""Times of calls made lines: a fixed time, and one for each floating-point operation, byte and block. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from paceline.calibrate.timed_pass import Timed
from paceline.plan.hardware import Rates


def rates(calls: Sequence[Timed]) -> dict[str, Rates]:
    """The lines of each operator and precision that was called with several sizes, and of each kind for the others.

    Args:
        calls: Of models of several sizes, so that what a call takes can be told from what a byte does.
    """
    samples: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for operation, seconds in calls:
        row = operation.flops, operation.bytes, seconds, float(operation.blocks)
        samples[f"{operation.kind} {operation.dtype}"].append(row)
        if operation.name:
            samples[f"{operation.name} {operation.dtype}"].append(row)
    # Calls of one size tell nothing of another; where an operator has no line, its kind's is taken.
    kinds = {f"{operation.kind} {operation.dtype}" for operation, _ in calls}
    told = {name: rows for name, rows in samples.items() if name in kinds or len({(f, b) for f, b, *_ in rows}) > 1}
    return {name: line(*map(list, zip(*rows, strict=True))) for name, rows in told.items()}


def line(
    flops: Sequence[float], sizes: Sequence[float], seconds: Sequence[float], blocks: Sequence[float] = ()
) -> Rates:
    """The `Rates` of least error that have no negative part, and at most three parts.

    Errors are counted relative to the root of the time: calls of milliseconds should be right to a few percent, but
    those of microseconds, of which a step has many, must not be lost beside them. Of the non-negative solutions, those
    where some parts are 0 are tried one by one, as there are few.

    Args:
        flops: Floating-point operations of each call.
        sizes: Bytes of each.
        seconds: Time of each, positive.
        blocks: Blocks in which each works; none: they do not.
    """
    times = np.asarray(seconds, dtype=np.float64)
    columns = np.asarray([np.ones(len(times)), flops, sizes, blocks or np.zeros(len(times))], dtype=np.float64)
    weights = 1 / np.sqrt(times)
    # Scaled, as operations and seconds are many powers of ten apart.
    scale = np.maximum(np.abs(columns).max(axis=1), 1e-300)
    scaled, wanted = (columns / scale[:, None] * weights).T, times * weights
    best, least = np.zeros(4), float("inf")
    for count in (3, 2, 1):
        for chosen in combinations(range(4), count):
            if np.linalg.matrix_rank(scaled[:, chosen]) < count:
                # Too few sizes to tell these parts from each other.
                continue
            found, *_ = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)
            error = float(np.square(scaled[:, chosen] @ found - wanted).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                least, best = error, np.zeros(4)
                best[list(chosen)] = found
    return Rates(*(best / scale).tolist())
