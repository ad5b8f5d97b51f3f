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
    """Rows of one table that have gradients since these were last dropped, zeroed or used.

    `zero_grad(set_to_none=False)` is told by what a backward finds in `p.grad`, of which this rank may have some rows
    alone: those of before count, unless nothing is left on any rank.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows, self.before, self.latest = (torch.zeros(rows, dtype=torch.bool, device=device) for _ in range(3))
        self.is_zeroed = self.is_dense = False
        self._pass = -1

    def begin(self, earlier: Tensor | None) -> None:
        """A backward begins, which adds to an earlier gradient; autograd may have come to the table before that."""
        self._follow()
        if earlier is None:
            self.rows.zero_()
            self.before.zero_()
            self.is_zeroed = self.is_dense = False
        elif self.rows.any() and not earlier.any():
            self.before |= self.rows
            self.rows.zero_()
            self.is_zeroed = True

    def add(self, gradient: Tensor) -> None:
        """Autograd adds a gradient."""
        self._follow()
        if gradient.is_sparse:
            self.latest[gradient._indices()[0]] = True
        else:
            self.is_dense = True

    def _follow(self) -> None:
        if (now := torch._C._current_graph_task_id()) != self._pass:
            self._pass = now
            self.rows |= self.latest
            self.latest.zero_()

    def clear(self) -> None:
        """No row has a gradient."""
        self.latest.zero_()
        self.begin(None)

    def of_all(self, add_up: Callable[[Tensor], None], ranks: int) -> Tensor | None:
        """The rows that any rank has touched: int64; None where some gradient was dense. A collective call."""
        told = torch.stack([self.rows | self.latest, self.before]).double()
        flags = torch.tensor([[self.is_zeroed], [self.is_dense]], dtype=torch.float64, device=told.device)
        told = torch.cat([told, flags], 1)
        add_up(told.view(-1))
        (rows, before), (zeroed, dense) = told[:, :-1], told[:, -1].tolist()
        if dense:
            return None
        touched: Tensor = rows if zeroed == ranks else rows + before
        return touched.nonzero().squeeze(1)


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
                rows = self._touched[id(table)].of_all(add_up, ranks)
                if rows is None:
                    continue  # torch's own words of what it does not take
                sparse = torch.sparse_coo_tensor(
                    rows[None], dense[rows], dense.shape, is_coalesced=True, check_invariants=False
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
        """An optimizer has used gradients: what comes to its tables now is the next step's."""
        for group in optimizer.param_groups if self._touched else ():
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
