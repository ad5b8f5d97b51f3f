"""An exception in a hook wakes the ranks that wait for this one, which would else do so until their time limit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from paceline.core.step_state import StepState
from paceline.engine.program import Program


class Follower(Protocol):
    """Follows the steps of one model."""

    state: StepState
    program: Program


F = TypeVar("F", bound=Follower)
P = ParamSpec("P")
T = TypeVar("T")


def gives_up(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Lets peers that wait for this rank know when it raises in a hook, unless all do so alike before they begin."""

    @functools.wraps(method)
    def told(self: F, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.state.is_partly_loaded:
            self.state.require_whole_weights("forward, backward or optimizer.step()")
        try:
            # Branches of a forward may run in threads.
            with self.program.lock:
                return method(self, *args, **kwargs)
        except Exception as error:
            # On any error the other ranks go on to wait for this one.
            if self.program.collectives is not None:
                self.program.collectives.give_up(error)
            raise

    return told  # type: ignore[return-value]
