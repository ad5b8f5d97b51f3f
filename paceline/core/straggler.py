"""The rank that the others stand still for: in so many steps that it is no chance, and not for nothing. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_MOST_CHANCE = 0.25
"""A rank is named if ranks that are alike would make one of them look as slow less often than this."""
_LEAST = 0.02
"""Of a step: what a rank has to cost the others to be named."""


class Costly(NamedTuple):
    """A rank that stands out.

    Attributes:
        rank: The rank.
        steps: In how many steps the others stood still longest for it.
        cost: Seconds of a step that another rank stands still for it, in the middle of all steps.
    """

    rank: int
    steps: int
    cost: float


def costliest(costs: Sequence[Mapping[int, float]], seconds: float) -> Costly | None:
    """The rank that stands out; None where none does.

    Args:
        costs: Of each step, seconds that the others stood still for each rank, on average over them.
        seconds: Length of a step.
    """
    ranks = len({rank for each in costs for rank in each})
    if ranks < 2:
        return None
    ((rank, often),) = Counter(max(each, key=lambda rank: each[rank]) for each in costs).most_common(1)
    cost = statistics.median(each[rank] for each in costs if rank in each)
    if ranks * _by_chance(often, len(costs), 1 / ranks) > _MOST_CHANCE or cost < _LEAST * seconds:
        return None
    return Costly(rank, often, cost)


def _by_chance(least: int, tries: int, probability: float) -> float:
    """Returns the probability that something of `probability` happens in at least `least` of `tries` tries."""
    return sum(math.comb(tries, n) * probability**n * (1 - probability) ** (tries - n) for n in range(least, tries + 1))
