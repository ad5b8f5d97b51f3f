"""Ranks that have no micro-batch while others have one, and only follow the schedule then."""

from __future__ import annotations

import weakref

from paceline.core.errors import EngineError
from paceline.executor.collectives import Collectives

_now: weakref.WeakSet[IdleRanks] = weakref.WeakSet()
"""`IdleRanks` of the models of which some rank only follows the schedule in this micro-batch."""


class IdleRanks:
    """Refuses what ranks without a micro-batch of a model would not take part in."""

    def __init__(self, collectives: Collectives | None) -> None:
        """There are none. With one rank, nor are there `collectives`."""
        self._collectives = collectives

    def there_are(self, some: bool) -> None:
        """Takes note whether some rank has no micro-batch of the model now."""
        (_now.add if some else _now.discard)(self)

    def require_none(self, what: str) -> None:
        """Refuses what no schedule foresees.

        Args:
            what: That, in words.

        Raises:
            EngineError: There is such a rank.
        """
        if self in _now:
            self._refuse(
                f"{what} while a rank has no micro-batch, which with zero=3 follows the schedule alone: give every "
                "rank as many micro-batches, or set strategy.zero to 2 or less"
            )

    def require_of_own_model(self, unit: str) -> None:
        """Refuses to gather a unit in a micro-batch of another model's that some rank has not.

        Raises:
            EngineError: There is such a model, and this is none.
        """
        if _now and self not in _now:
            self._refuse(
                f"{unit} is gathered in a micro-batch that pl.accumulate gives to another model and not to every rank, "
                "so some will not take part: set strategy.zero to 2 or less for this model, or give every rank as many"
            )

    def _refuse(self, message: str) -> None:
        error = EngineError(message)
        if self._collectives is not None:
            self._collectives.give_up(error)
        raise error
