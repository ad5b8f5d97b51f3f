"""Sparse gradients for the optimizer that takes no others: of the rows of tables that some rank has touched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import UserError
from paceline.hooks.parameters import is_accumulated
from paceline.tensors.assigned_gradient import gradient_of, set_gradient

_TABLES = (nn.Embedding, nn.EmbeddingBag)


class _Touched:
    """When each row of a table last got a gradient, counted in backward passes, and when there was none before a pass.

    A gradient is zeroed or dropped where that is so on all ranks: one alone may have none for want of rows. Passes are
    numbered alike on all.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._latest = torch.zeros(rows, dtype=torch.int64, device=device)
        self.clear()

    def begin(self, earlier: Tensor | None) -> None:
        """A backward begins, which adds to an earlier gradient."""
        self._number += 1
        self._pass = torch._C._current_graph_task_id()
        if earlier is None or not earlier.any():
            self._without.append(self._number)

    def add(self, gradient: Tensor) -> None:
        """Autograd adds a gradient, in a pass that it may be the first to tell of."""
        number = self._number + (torch._C._current_graph_task_id() != self._pass)
        self._latest[gradient._indices()[0] if gradient.is_sparse else slice(None)] = number

    def clear(self) -> None:
        """No row has a gradient."""
        self._latest.zero_()
        self._without: list[int] = []
        self._number, self._pass = 0, -1

    def of_all(self, add_up: Callable[[Tensor], None], ranks: int) -> Tensor:
        """Which rows any rank has touched since no rank had a gradient: bool. A collective call."""
        without = torch.zeros(self._number + 1, dtype=torch.float64, device=self._latest.device)
        without[self._without] = 1
        add_up(without)
        since = max((number for number, count in enumerate(without.tolist()) if count == ranks), default=1)
        self._number, self._latest = self._number + 1 - since, (self._latest + 1 - since).clamp(min=0)
        self._without = [number + 1 - since for number in self._without if number >= since]
        touched = (self._latest > 0).double()
        add_up(touched)
        return touched > 0


class SparseGradients:
    """What `p.grad` of a table is inside the step of `SparseAdam`: between steps flat buffers hold dense ones."""

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Notes rows of the tables of a model, as they get gradients.

        Args:
            module: The model.
            parameters: Those that are laid out.
        """
        tables = {id(m.weight) for m in module.modules() if isinstance(m, _TABLES) and m.sparse}
        self._tables = [p for p in parameters if id(p) in tables and p.requires_grad]
        self._touched = {id(p): _Touched(p.shape[0], p.device) for p in self._tables}
        self._dense: list[tuple[nn.Parameter, Tensor]] = []
        self.handles: list[RemovableHandle] = [
            p.register_hook(_noting(weakref.ref(p), weakref.ref(self))) for p in self._tables
        ]

    def begin(self) -> None:
        """A backward begins, and `p.grad` is what a loop has left there."""
        if not self._tables:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for table, touched in zip(self._tables, self._touched.values(), strict=True):
                touched.begin(gradient_of(table))

    def note(self, table: nn.Parameter, gradient: Tensor) -> None:
        """Autograd is about to add a gradient to a table's."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._touched[id(table)].add(gradient)

    def show(
        self, optimizer: Optimizer, own: Callable[[int], bool], add_up: Callable[[Tensor], None], ranks: int
    ) -> None:
        """Gives `SparseAdam` sparse gradients. A collective call.

        Args:
            optimizer: Is about to step, and finds whole gradients.
            own: Whether the parameter with this `id()` is the model's.
            add_up: Sums fp64 numbers over ranks, in place.
            ranks: Number of ranks.

        Raises:
            UserError: It has a parameter whose sparse gradients nobody tells of.
        """
        if not isinstance(optimizer, SparseAdam):
            return
        for table in (p for group in optimizer.param_groups for p in group["params"] if own(id(p))):
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                dense = gradient_of(table)
                if dense is None:
                    continue
                if id(table) not in self._touched:
                    raise UserError(
                        "SparseAdam takes sparse gradients alone, and between ranks one is dense once it is reduced, "
                        "but for those of nn.Embedding and nn.EmbeddingBag with sparse=True: make the table one of "
                        "these, or use Adam"
                    )
                # As are those of a step before whose gradients the loop has kept.
                rows = self._touched[id(table)].of_all(add_up, ranks) | dense.flatten(1).any(1)
                sparse = torch.sparse_coo_tensor(
                    rows.nonzero().t(), dense[rows], dense.shape, is_coalesced=True, check_invariants=False
                )
                self._dense.append((table, dense))
            set_gradient(table, sparse)

    def take_back(self) -> None:
        """Gradients are dense again."""
        for table, dense in self._dense:
            if table.grad is not None:
                set_gradient(table, dense)
        self._dense = []

    def used(self, optimizer: Optimizer) -> None:
        """An optimizer has used gradients: one that asks for no rows leaves none to be told of."""
        for group in optimizer.param_groups if self._touched and not isinstance(optimizer, SparseAdam) else ():
            for parameter in group["params"]:
                if id(parameter) in self._touched:
                    self._touched[id(parameter)].clear()


def _noting(table: weakref.ref[nn.Parameter], gradients: weakref.ref[SparseGradients]) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        parameter, alive = table(), gradients()
        # It is also called where `torch.autograd.grad` takes the gradient.
        if parameter is not None and alive is not None and is_accumulated(parameter):
            alive.note(parameter, gradient)

    return note
