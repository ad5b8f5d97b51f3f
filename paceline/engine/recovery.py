"""When training goes on from somewhere else: a step that a rank gave up, or weights that were read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from paceline.core.ops import WRITTEN

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

P = ParamSpec("P")
T = TypeVar("T")


def gives_up(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
    """Lets peers that wait for this rank know when it raises in a hook, unless all do so alike before they begin."""

    @functools.wraps(method)
    def told(self: Engine, *args: P.args, **kwargs: P.kwargs) -> T:
        self.state.require_whole_weights("forward, backward or optimizer.step()")
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if self.program.collectives is not None:
                self.program.collectives.give_up(error)
            raise

    return told  # type: ignore[return-value]


def reset(engine: Engine) -> None:
    """After an exception in forward or backward: drops the step's gradients and makes the engine usable.

    A collective call. Ranks may have failed in different places: collectives that some began and others did not end
    with their connections, and new ones are opened. Weights are what they were before the step.

    Raises:
        EngineError: Several ranks hold a GPU each, where other ranks' updates cannot be held back.
    """
    program = engine.program
    if program.collectives is not None:
        program.collectives.require_reopens("pl.reset")
    engine.update.abandon()
    engine.state.reset()
    engine.forward.reset()
    for parameter in program.parameters.all:
        parameter.grad = None
    program.parameters.waiting.clear()
    program.parameters.take_given()
    program.parameters.unpin()
    program.parameters.rest()
    program.parameters.take_as_they_are()
    if program.collectives is not None:
        program.collectives.reopen()
    engine.backward.reset()
    if program.gradients is not None:
        program.gradients.earlier.forget()
    program.statistics.clear()
    program.module_buffers.reset()
    program.start()
    # A gather after the last update may have been among what was given up.
    program.parameters.updated()
    engine.forward.gather_update()


def weights_replaced(engine: Engine) -> None:
    """After this rank's shards, as they are updated, were written to between two steps: all else follows them.

    A collective call.
    """
    parameters = engine.program.parameters
    for parameter in parameters.all:
        parameter.grad = None
    engine.state.replace_weights()
    if engine.program.gradients is not None:
        engine.program.gradients.earlier.forget()
    parameters.updated()
    if engine.schedule.shares_memory and engine.program.collectives is not None:
        # What other ranks rounded is read by this one.
        engine.program.collectives.barrier(WRITTEN)
    engine.forward.gather_update()
    parameters.rest()
    parameters.take_as_they_are()
