"""Units whose forward runs other units: these are a part of theirs."""

from __future__ import annotations

import threading

from paceline.core.errors import EngineError


class UnitsUnderWay:
    """The units in whose forward each thread is, the innermost last.

    Attributes:
        inner: Those that have run inside another one's. They have no place in the order of units, in which one is over
            once the next begins: like parameters of no unit, theirs are there for all that computes.
    """

    def __init__(self) -> None:
        """Knows of none yet."""
        self._of_thread = threading.local()
        self.inner: set[str] = set()

    @property
    def _units(self) -> list[str]:
        found: list[str] = self._of_thread.__dict__.setdefault("units", [])
        return found

    @property
    def is_inside(self) -> bool:
        """Whether the unit that runs does so inside the forward of a unit, be it its own."""
        return len(self._units) > 1

    @property
    def outermost(self) -> str | None:
        """The unit that runs inside no other; None where none runs."""
        return self._units[0] if self._units else None

    def begin(self, unit: str) -> None:
        """A unit's forward begins."""
        units = self._units
        if units and units[-1] != unit:
            self.inner.add(unit)
        units.append(unit)

    def end(self, unit: str) -> None:
        """A unit's forward has ended, or failed."""
        if self._units and self._units[-1] == unit:
            self._units.pop()

    def require_no_circle(self) -> None:
        """Refuses a unit inside a unit that it runs itself: what it computes with would go before it has ended.

        Raises:
            EngineError: It is one.
        """
        *outer, unit = self._units
        if unit in outer and unit != outer[-1]:
            raise EngineError(
                f"{unit} runs {outer[-1]}, another unit, inside its forward, and that runs {unit} again: with zero=3 "
                "name the module that holds both in strategy.units, set strategy.accumulation to hold, or "
                "strategy.zero to 2 or less"
            )
