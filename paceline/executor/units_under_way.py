"""Units whose forward runs other units: refused where each is resharded once another one begins."""

from __future__ import annotations

import threading

from paceline.core.errors import EngineError
from paceline.core.schedule import Schedule


class UnitsUnderWay:
    """The units in whose forward each thread is, the innermost last.

    Attributes:
        inner: Those that have run inside another one's, as a part of that.
    """

    def __init__(self) -> None:
        """Knows of none yet."""
        self._units: dict[int, list[str]] = {}
        self.inner: set[str] = set()

    def begin(self, unit: str, schedule: Schedule) -> None:
        """A unit's forward begins.

        Raises:
            EngineError: It does so inside another one's, and the schedule takes them to run one after another.
        """
        units = self._units.setdefault(threading.get_ident(), [])
        outer = units[-1] if units else unit
        if outer != unit:
            if schedule.reshards_after_forward and {unit, outer} <= schedule.slot.keys():
                raise EngineError(
                    f"{outer} runs {unit}, a unit of its own, inside its forward: with zero=3 the parameters of a unit "
                    "go once another one begins. Set strategy.accumulation to hold, or strategy.zero to 2 or less"
                )
            self.inner.add(unit)
        units.append(unit)

    def end(self, unit: str) -> None:
        """A unit's forward has ended."""
        units = self._units.get(threading.get_ident())
        if units and units[-1] == unit:
            units.pop()

    def clear(self) -> None:
        """Another pass begins, whatever became of the one before."""
        self._units.clear()
