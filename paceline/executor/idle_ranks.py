"""Ranks that have no micro-batch while others have one, and only follow the schedule then."""

from __future__ import annotations

import weakref

from paceline.comm.control import all_gather_json
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from paceline.executor.collectives import Collectives

_now: weakref.WeakSet[IdleRanks] = weakref.WeakSet()
"""`IdleRanks` of the models of which some rank only follows the schedule in this micro-batch."""


class IdleRanks:
    """Refuses what ranks without a micro-batch of a model would not take part in."""

    def __init__(self, collectives: Collectives | None, strategy: Strategy, model: str) -> None:
        """There are none. With one rank, nor are there `collectives`; `model` is the model's name."""
        self._collectives, self._model = collectives, model
        self._reduces_each = strategy.reduces_every_micro_batch
        self._has_backward = self._is_to_meet = False

    def there_are(self, some: bool) -> None:
        """A micro-batch of the model begins, or the last one is over: whether some rank has none."""
        (_now.add if some else _now.discard)(self)
        self._has_backward = False
        self._is_to_meet |= some

    def reset(self) -> None:
        """The step is given up, by all ranks."""
        self.there_are(False)
        self._is_to_meet = False

    def begin_backward(self, synchronises: bool) -> None:
        """A backward begins, which ranks without the micro-batch follow once.

        Raises:
            EngineError: They do not: it is the second one, or the micro-batch another model's.
        """
        if synchronises or self._reduces_each:
            self.require_followed()
        self._require_first("backward")
        self._has_backward = True

    def require_followed(self) -> None:
        """Refuses a backward that ranks do something together in, in a micro-batch of another model's that some lack.

        Raises:
            EngineError: It is such a micro-batch.
        """
        if _now and self not in _now:
            self._refuse(
                f"gradients of {self._model} would be reduced in a micro-batch that pl.accumulate gives to another "
                "model and not to every rank, so some will not take part: let its parameters require no gradient "
                "meanwhile (requires_grad_(False)), or give every rank as many micro-batches"
            )

    def begin_extra_forward(self) -> None:
        """A forward begins that gathers all units: the first one after a step without an update, or one too many.

        Raises:
            EngineError: It comes after the micro-batch's backward, where ranks without the micro-batch do not follow.
        """
        self._require_first("forward")

    def _require_first(self, what: str) -> None:
        if self in _now and self._has_backward:
            self._refuse(
                f"a second {what} of {self._model} in one micro-batch of pl.accumulate(..., uneven=True), which a rank "
                "that has none follows once: add the losses up and call backward on their sum, or give every rank as "
                "many micro-batches"
            )

    def meet(self) -> None:
        """Sees before an update that no rank has refused what others could not follow. A collective call then."""
        if self._is_to_meet:
            self._is_to_meet = False
            all_gather_json(None, "optimizer.step() after micro-batches that not every rank had")

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
                "so some will not take part: set strategy.zero to 2 or less for this model and let its parameters "
                "require no gradient meanwhile, or give every rank as many"
            )

    def _refuse(self, message: str) -> None:
        error = EngineError(message)
        # Other ranks wait for this one in what it cannot go on with: of this model, or of the one whose turn it is.
        for each in {self, *_now}:
            if each._collectives is not None:
                each._collectives.give_up(error)
        raise error
