"""Who is given a model's events: also of a recording over a step that was given up, and its executor with it."""

from __future__ import annotations

from paceline.core.errors import EngineError
from paceline.core.events import Event, without_cut_step
from paceline.executor.executor import Executor
from paceline.executor.records import MOST_OPS


class Recorder:
    """Reads what a model's executor keeps, for one reader at a time.

    Attributes:
        is_on: Whether ops are recorded.
    """

    def __init__(self, is_on: bool) -> None:
        """Reads from no executor yet."""
        self.is_on = is_on
        self._executor: Executor | None = None
        self._recorded: list[Event] | None = None

    def attach(self, executor: Executor) -> None:
        """From now on this one executes, with nothing under way."""
        if self._recorded is not None:
            # The step under way is given up.
            self._recorded += without_cut_step(self._of().drain())
            executor.keep(MOST_OPS)
        self._executor = executor

    def record(self, on: bool) -> None:
        """Whether ops are recorded from now on; see `Engine.record_events`.

        Raises:
            EngineError: `pl.record` records.
        """
        self._require_not_recorded("Engine.record_events")
        self.is_on = on
        self._of().record(on)

    def drain(self) -> list[Event]:
        """The events of every op executed since the last call, while they were recorded.

        Raises:
            EngineError: `pl.record` records.
        """
        self._require_not_recorded("Engine.drain_events")
        return self._of().drain()

    def begin(self) -> bool:
        """Records all ops until `end`, for nobody else; whether they were recorded before.

        Raises:
            EngineError: It has begun already.
        """
        self._require_not_recorded("pl.record")
        was_on = self.is_on
        self.drain()
        self.record(True)
        self._of().keep(MOST_OPS)
        self._recorded = []
        return was_on

    def end(self, was_on: bool) -> list[Event]:
        """The events since `begin`, of whole steps where the first were too many; records as before it."""
        assert self._recorded is not None
        executor = self._of()
        overflowed = executor.keep(MOST_OPS) == MOST_OPS
        events = [*self._recorded, *executor.drain()]
        self._recorded = None
        executor.keep()
        self.record(was_on)
        if overflowed:
            # The first step that is left lacks those of its ops that were forgotten.
            events = [event for event in events if event.step != events[0].step]
        return events

    def _of(self) -> Executor:
        assert self._executor is not None
        return self._executor

    def _require_not_recorded(self, what: str) -> None:
        if self._recorded is not None:
            raise EngineError(
                f"{what} inside `with pl.record(model):`: the model is recorded already. Call it after the block, "
                "which alone is given events"
            )
