"""How often to save where things fail, and which share of the time is then useful. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paceline.command_line import quantities as said
from paceline.plan.quantities import duration

SAVED = 12
"""Bytes of a checkpoint for each parameter: the fp32 master and Adam's two states, of which the rest follows."""
_USEFUL = 0.001
"""Of the time: with less nothing gets on."""
_HOPELESS = 10.0
"""Times the mean between two failures that work until the next checkpoint takes: one in 20,000 tries comes so far."""
STORAGE = 2e9
"""Bytes a second that a host writes, where nobody said what saving takes."""


@dataclass(frozen=True)
class Failures:
    """What failures cost.

    Attributes:
        between: Seconds from one failure to the next, on average.
        saving: Seconds that saving takes.
        restarting: Seconds until work goes on after a failure, without what is computed again.
        interval: Seconds of work between two checkpoints, by Daly's formula.
        young: The same by Young's.
        goodput: Share of the time that computes what stays.
    """

    between: float
    saving: float
    restarting: float
    interval: float
    young: float
    goodput: float

    @property
    def in_words(self) -> str:
        """A sentence."""
        if not self.goodput and self.restarting / self.between > _HOPELESS:
            return (
                f"something fails every {duration(self.between)}, before work goes on again, which takes "
                f"{duration(self.restarting)}: this does not get on"
            )
        if not self.goodput:
            return (
                f"something fails every {duration(self.between)}, before what was done is saved, which takes "
                f"{duration(self.saving)}: this does not get on"
            )
        return (
            f"something fails every {duration(self.between)}: save every {duration(self.interval)}, which takes "
            f"{duration(self.saving)}; {said.share(self.goodput)} of the time is useful"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "seconds_between": self.between,
            "saving_seconds": self.saving,
            "restarting_seconds": self.restarting,
            "interval_seconds": self.interval,
            "young_interval_seconds": self.young,
            "goodput": self.goodput,
        }


def saving_seconds(parameters: int, hosts: int) -> float:
    """What saving takes: `SAVED` bytes a parameter, written by all hosts at once."""
    return parameters * SAVED / (hosts * STORAGE)


def failures(between: float, saving: float, restarting: float) -> Failures:
    """The best interval between checkpoints, and what is left of the time with it.

    With d seconds to save, M between failures and R to start again, Young (1974) takes sqrt(2 d M); Daly (2006,
    equation 37) takes sqrt(2 d M) (1 + sqrt(d / 2 M) / 3 + d / (2 M) / 9) - d where d < 2 M, else M. Failures come at
    random, so that t seconds of work, saved after each, take M exp(R / M) (exp((t + d) / M) - 1) (Daly's equation 20).

    Args:
        between: M, above 0.
        saving: d, at least 0.
        restarting: R, at least 0.
    """
    young = math.sqrt(2 * saving * between)
    interval = between
    if saving < 2 * between:
        share = math.sqrt(saving / (2 * between))
        interval = young * (1 + share / 3 + share**2 / 9) - saving
    # Whoever saves at no cost loses next to nothing.
    interval = max(interval, 1e-6 * between)
    exponent = (interval + saving) / between
    if exponent > _HOPELESS or restarting / between > _HOPELESS:
        return Failures(between, saving, restarting, interval, young, 0.0)
    takes = between * math.exp(restarting / between) * math.expm1(exponent)
    goodput = interval / takes
    return Failures(between, saving, restarting, interval, young, goodput if goodput >= _USEFUL else 0.0)
