"""How wrong forecasts are: figures of many rows, beside what one constant would give. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

NEAR = 0.02
"""Measurements closer than this, as a share, have no order: runs repeat no better."""


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of some rows.

    Attributes:
        rows: How many.
        mean: Their mean.
        median: Half of them are below it.
        p90: Nine of ten are.
        worst: The largest.
    """

    rows: int
    mean: float
    median: float
    p90: float
    worst: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)


def errors(relative: Sequence[float]) -> Errors | None:
    """Figures of relative errors; None of none."""
    sizes = sorted(abs(each) for each in relative)
    if not sizes:
        return None
    return Errors(len(sizes), sum(sizes) / len(sizes), _quantile(sizes, 0.5), _quantile(sizes, 0.9), sizes[-1])


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest values, as numpy does."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def constant_utilisation(seconds: Sequence[float], ideal: Sequence[float], kinds: Sequence[Hashable]) -> list[float]:
    """Relative errors of the simplest forecast: that all of a kind reach one share of the peak.

    That share is the median of the others of the kind; a row without others has no forecast and is left out.

    Args:
        seconds: Measured.
        ideal: Seconds of the model's FLOPs at the device's peak.
        kinds: Of each row, such as device and precision.
    """
    found = []
    for index, kind in enumerate(kinds):
        others = sorted(
            ideal[other] / seconds[other] for other, each in enumerate(kinds) if each == kind and other != index
        )
        if others:
            found.append(ideal[index] / _quantile(others, 0.5) / seconds[index] - 1)
    return found


def in_order(measured: Sequence[float], predicted: Sequence[float]) -> tuple[int, int]:
    """How many pairs a forecast puts in the order in which they were measured, of those that have one.

    Args:
        measured: Such as tokens a second and device.
        predicted: The same.
    """
    right = pairs = 0
    for (first, guessed), (second, other) in combinations(zip(measured, predicted, strict=True), 2):
        if abs(first / second - 1) > NEAR:
            pairs += 1
            right += (first > second) == (guessed > other)
    return right, pairs
