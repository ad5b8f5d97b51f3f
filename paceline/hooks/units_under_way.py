"""Units whose forward runs other units: these are a part of theirs."""

from __future__ import annotations

import threading

from paceline.core.errors import EngineError


class _Here(threading.local):
    def __init__(self) -> None:
        self.units: list[str] = []


class UnitsUnderWay:
    """The units in whose forward each thread is, the innermost last.

    Attributes:
        inner: Those that have run inside another one's. They have no place in the order of units, in which one is over
            once the next begins: like parameters of no unit, theirs are there for all that computes.
    """

    def __init__(self) -> None:
        """Knows of none yet."""
        self._here = _Here()
        self.inner: set[str] = set()

    @property
    def is_inside(self) -> bool:
        """Whether the unit that runs does so inside the forward of a unit, be it its own."""
        return len(self._here.units) > 1

    @property
    def outermost(self) -> str | None:
        """The unit that runs inside no other; None where none runs."""
        return self._here.units[0] if self._here.units else None

    def begin(self, unit: str) -> None:
        """A unit's forward begins."""
        units = self._here.units
        if units and units[-1] != unit:
            self.inner.add(unit)
        units.append(unit)

    def end(self, unit: str) -> None:
        """A unit's forward has ended, or failed."""
        if self._here.units and self._here.units[-1] == unit:
            self._here.units.pop()

    def require_no_circle(self) -> None:
        """Refuses a unit inside a unit that it runs itself: what it computes with would go before it has ended.

        Raises:
            EngineError: It is one.
        """
        *outer, unit = self._here.units
        if unit in outer and unit != outer[-1]:
            raise EngineError(
                f"{unit} runs {outer[-1]}, another unit, inside its forward, and that runs {unit} again: with zero=3 "
                "name the module that holds both in strategy.units, set strategy.accumulation to hold, or "
                "strategy.zero to 2 or less"
            )
