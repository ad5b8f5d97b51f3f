"""Which of several forecasts to take. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from paceline.core.strategy import Strategy

ALIKE = 0.005
"""Steps that differ by less are called equally fast: a forecast does not know more."""

Forecast = TypeVar("Forecast")


def preferred(
    forecasts: Sequence[Forecast], seconds: Callable[[Forecast], float], strategy: Callable[[Forecast], Strategy]
) -> Forecast:
    """The fastest; of those that are as fast the one of the lowest stage, and of these one that recomputes nothing.

    Each stage adds collectives and what ranks wait for each other there, of which a forecast sees the bytes: what it
    leaves out makes the higher stage slower.

    Args:
        forecasts: Those that are possible, at least one.
        seconds: What a step takes by one of them.
        strategy: How it shares the step.
    """
    longest = (1 + ALIKE) * min(map(seconds, forecasts))

    def demands(each: Forecast) -> tuple[int, bool, float]:
        return strategy(each).stage, strategy(each).recompute != "none", seconds(each)

    return min((each for each in forecasts if seconds(each) <= longest), key=demands)
