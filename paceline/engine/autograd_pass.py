"""A backward pass as autograd runs it: whether it is this model's, alone or with others in one graph, and its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd import Variable

from paceline.comm.living import Living
from paceline.core.errors import EngineError
from paceline.engine.program import Program
from paceline.engine.unit_order import UnitOrder
from paceline.hooks.parameters import will_accumulate


class AutogradPass:
    """The pass of one model, which may be a part of one that others are in, too.

    Autograd begins with the one model or the other, on each rank as its graph goes; what ranks wait for each other in,
    they do in one order of models.
    """

    def __init__(self, program: Program, order: UnitOrder, end: Callable[[], None]) -> None:
        """No pass is under way.

        Args:
            program: The model's.
            order: In which its units run.
            end: Ends its pass.
        """
        self._program, self._order, self._end = program, order, weakref.WeakMethod(end)
        self._task = self._ignored = -1
        _PASSES.add(self)

    # ---- what it is

    def is_ours(self, unit: str | None) -> bool:
        """Whether the pass that begins leaves gradients in the model's parameters; if not, its hooks are passed over.

        Args:
            unit: The one that told of it, so that its parameters are asked about first; None: the whole model.

        Raises:
            EngineError: It does not, and parameters are not those that were laid out.
        """
        program = self._program
        own = [program.parameters.all[index] for index in program.slots_of(unit)] if unit is not None else []
        if self._leaves_gradients(own) or self._leaves_gradients(program.parameters.all):
            return True
        program.structure.require_unchanged()
        self._ignored = torch._C._current_graph_task_id()
        return False

    def _leaves_gradients(self, parameters: Sequence[nn.Parameter]) -> bool:
        return torch._C._current_graph_task_id() != self._ignored and will_accumulate(parameters)

    def hands_out(self, unit: str | None) -> bool:
        """Whether a pass inside the one under way, such as an adjoint's, hands out a unit's gradients.

        To be asked inside autograd. A reentrant checkpoint's leaves them in the parameters.
        """
        if torch._C._current_graph_task_id() == self._task:
            return False
        program = self._program
        asked = program.slots_of(unit) if unit is not None else range(len(program.parameters.all))
        own = [p for p in map(program.parameters.all.__getitem__, asked) if p.requires_grad]
        return bool(own) and not will_accumulate(own)

    # ---- begin and end

    def adopt_orders(self) -> None:
        """Adopts the order of units of this model, and of all others that the pass leaves gradients in."""
        others = [
            other
            for other in _PASSES
            if other is self or (other._order.is_open and will_accumulate(other._program.parameters.all))
        ]
        for other in others:
            if other._order.is_open:
                other._order.require_followed()
        for other in others:
            other._order.adopt()

    def begin(self) -> None:
        """The pass begins inside autograd, and is ended when that is through. Refuses one that makes a graph."""
        if torch.is_grad_enabled() and self._program.collectives is not None:
            raise EngineError(
                "backward with create_graph=True leaves gradients in p.grad, which ranks reduce without a graph: what "
                "is computed of them would lose its own. Take torch.autograd.grad(loss, ..., create_graph=True)"
            )
        # Queued from the outermost graph: from inside a reentrant checkpoint it would run when that one ends.
        Variable._execution_engine.queue_callback(self._end_all)
        self._task = torch._C._current_graph_task_id()

    def _end_all(self) -> None:
        """Ends this pass, if another model's did not, and those of the other models in the same graph."""
        for other in [other for other in _PASSES if other._task == self._task and other._task != -1]:
            other.forget()
            if (end := other._end()) is not None:
                end()

    def forget(self) -> None:
        """The pass is over, or given up."""
        self._task = -1

    def remove(self) -> None:
        """The model is a plain one again, and is in no pass."""
        _PASSES.discard(self)


_PASSES: Living[AutogradPass] = Living()
"""In the order in which models were made parallel, the same on every rank."""
