"""Several models in one graph: what ranks wait for each other in, they do in one order of models."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable

from paceline.engine.program import Program
from paceline.engine.unit_order import UnitOrder
from paceline.hooks.structure import will_accumulate


class SharedGraph:
    """The backward pass of one model, which may be a part of one that others are in, too.

    Autograd begins with the one model or the other, on each rank as its graph goes.
    """

    def __init__(self, program: Program, order: UnitOrder, end: Callable[[], None]) -> None:
        """No pass is under way.

        Args:
            program: The model's.
            order: In which its units run.
            end: Ends its pass.
        """
        self._program, self._order, self._end = program, order, weakref.WeakMethod(end)
        self._task = -1
        _GRAPHS[self] = None

    def adopt_orders(self) -> None:
        """Adopts the order of units of this model, and of all others that the pass leaves gradients in."""
        for other in list(_GRAPHS):
            if other is self or (other._order.is_open and will_accumulate(other._program.parameters.all)):
                other._order.adopt()

    def begin(self) -> None:
        """The pass begins inside autograd, and is ended when that is through."""
        # Queued from the outermost graph: from inside a reentrant checkpoint it would run when that one ends.
        Variable._execution_engine.queue_callback(self._end_all)
        self._task = torch._C._current_graph_task_id()

    def _end_all(self) -> None:
        """Ends this pass, if another model's did not, and those of the other models in the same graph."""
        for other in [other for other in _GRAPHS if other._task == self._task and other._task != -1]:
            other.forget()
            if (end := other._end()) is not None:
                end()

    def forget(self) -> None:
        """The pass is over, or given up."""
        self._task = -1


_GRAPHS: weakref.WeakKeyDictionary[SharedGraph, None] = weakref.WeakKeyDictionary()
"""In the order in which models were made parallel, the same on every rank."""
