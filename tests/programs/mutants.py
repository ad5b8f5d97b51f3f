"""Engines that each make one mistake again, of those that ordinary training code was silently wrong by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from paceline.buffers.earlier_gradients import EarlierGradients
from paceline.core.step_state import StepState
from paceline.engine.backward import BackwardPass
from paceline.engine.gradients import Gradients
from paceline.hooks.units_under_way import UnitsUnderWay
from paceline.tensors import sharded_parameter
from paceline.tensors.assigned_gradient import set_gradient
from tests.engine.late_streams import LATEST, late_streams
from tests.engine.mutants import Mutant, mutated, nothing_on_its_way


def carried_twice(stack: ExitStack) -> None:
    """Reduced gradients that a loop leaves are added to by autograd, and what is reduced next is added to them."""
    carry = EarlierGradients._carry

    def carried(self: EarlierGradients, with_gradient: list[int], alone: bool, reduced: bool) -> None:
        left = {index: self._all[index].grad for index in with_gradient}
        carry(self, with_gradient, alone, reduced)
        for index, gradient in left.items():
            set_gradient(self._all[index], gradient)

    stack.enter_context(patch.object(EarlierGradients, "_carry", carried))


def complete_with_its_unit(stack: ExitStack) -> None:
    """A gradient is taken for complete when its unit's backward is over, and what comes later is not looked for."""
    stack.enter_context(patch.object(BackwardPass, "_is_complete", lambda self, unit: True))
    stack.enter_context(patch.object(Gradients, "after_copy_in", lambda self: []))


def placeholders_read(stack: ExitStack) -> None:
    """What is computed with a parameter whose values are elsewhere is computed with what stands in its place."""
    stack.enter_context(patch.object(sharded_parameter, "ask", lambda *args: None))


def forward_over_an_update(stack: ExitStack) -> None:
    """A forward that no backward ended goes on after the update: the next one loads no ops, and waits for none."""
    end_update = StepState.end_update

    def ended(self: StepState) -> None:
        phase = self.phase
        end_update(self)
        self.phase = phase

    stack.enter_context(patch.object(StepState, "end_update", ended))
    nothing_on_its_way(stack)


def one_unit_after_another(stack: ExitStack) -> None:
    """A unit that begins inside another one's forward is taken to come after it."""
    stack.enter_context(patch.object(UnitsUnderWay, "begin", lambda self, unit: None))
    stack.enter_context(patch.object(UnitsUnderWay, "require_no_circle", lambda self: None))


MUTANTS: dict[str, Mutant] = {
    "none": lambda stack: None,
    "gradients that stay count twice": carried_twice,
    "completion by modules": complete_with_its_unit,
    "placeholders are read": placeholders_read,
    "a forward between backward and step": forward_over_an_update,
    "units inside others": one_unit_after_another,
}


def with_mutant(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on a rank whose engine is a mutant, and whose collectives are late so that no wait is luck."""
    with mutated(MUTANTS[name]), late_streams(least=LATEST):
        return function(*args)
