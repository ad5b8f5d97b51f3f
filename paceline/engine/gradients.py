"""Gradients between autograd and the flat buffers: collected, reduced elsewhere, published."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.engine.buffers import Buffers
from paceline.errors import UserError


class Gradients:
    """Moves each parameter's gradient into its place and hands the reduced one back.

    `p.grad` is, between steps, a view into the flat buffer. While a synchronised backward runs it is None once a
    unit is collected, so that a gradient arriving late lands beside the buffer and is seen, not added to
    memory that a collective is reading.
    """

    def __init__(self, buffers: Buffers) -> None:
        """Works on `buffers`, whose gradients are allocated."""
        self._buffers = buffers
        self._trainable = [i for i, view in enumerate(buffers.gradients) if view is not None]
        self._carried: dict[int, Tensor] = {}
        self._collected: set[int] = set()
        self.used: set[int] = set()

    def begin(self, fresh_step: bool) -> None:
        """Prepares for a backward pass.

        Args:
            fresh_step: Nothing was accumulated locally since the last reduction. What `p.grad` holds then is
                already reduced (or the user's own) and is carried over, to be added after the reduction.
        """
        self._collected.clear()
        self.used.clear()
        if not fresh_step:
            self._drop_what_was_zeroed()
            return
        self._carried.clear()
        for index in self._trainable:
            parameter = self._buffers.parameters[index]
            if parameter.grad is not None:
                self._carried[index] = parameter.grad.clone() if self.holds(index) else parameter.grad
                parameter.grad = None

    def holds(self, index: int) -> bool:
        """Whether `p.grad` lies in the flat buffer, be it under another tensor object."""
        gradient, view = self._buffers.parameters[index].grad, self._buffers.gradients[index]
        return gradient is not None and view is not None and gradient.data_ptr() == view.data_ptr()

    def end_local(self) -> None:
        """Ends a backward that reduces nothing: what was carried over stays to be seen, and to be zeroed."""
        for index, carried in self._carried.items():
            if self._buffers.parameters[index].grad is None:
                self._buffers.parameters[index].grad = carried

    def _drop_what_was_zeroed(self) -> None:
        """`zero_grad` since the last backward also means what was carried over."""
        for index, carried in list(self._carried.items()):
            parameter = self._buffers.parameters[index]
            if parameter.grad is None or not parameter.grad.any():
                del self._carried[index]
            if parameter.grad is carried:
                parameter.grad = None

    def collect(self, indices: Iterable[int], synchronise: bool) -> None:
        """Takes the gradients of some parameters into the flat buffer, zero where one has none."""
        views: list[Tensor] = []
        fresh: list[Tensor] = []
        with torch.no_grad():
            for index in indices:
                parameter, view = self._buffers.parameters[index], self._buffers.gradients[index]
                if view is None:
                    continue
                self._collected.add(index)
                gradient = parameter.grad
                if gradient is None:
                    if synchronise:
                        view.zero_()
                    continue
                self.used.add(index)
                if gradient is not view:
                    if gradient.is_sparse:
                        raise UserError(
                            f"{self._buffers.layout.slots[index].spec.name} has a sparse gradient; flat buffers "
                            "hold dense ones: build the embedding with sparse=False"
                        )
                    views.append(view)
                    fresh.append(gradient)
                parameter.grad = None if synchronise else view
            if views:
                torch._foreach_copy_(views, fresh)

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter has a gradient on this rank, so that no other rank need be asked."""
        return len(self.used) == len(self._trainable)

    def late(self) -> list[int]:
        """Parameters whose gradient arrived after they were collected in a synchronised backward."""
        return [i for i in self._trainable if i in self._collected and self._buffers.parameters[i].grad is not None]

    def publish(self, used: Iterable[int], keep: bool) -> None:
        """Makes the reduced gradients the parameters' `grad`, with what was carried added.

        Args:
            used: Parameters that any rank has a gradient for; the others get None, which an optimizer skips.
            keep: Whether this rank holds the reduced gradients (with a parameter server, only rank 0 does).
        """
        chosen = set(used) if keep else set()
        with torch.no_grad():
            for index in self._trainable:
                carried = self._carried.get(index)
                view = self._buffers.gradients[index]
                assert view is not None
                if index in chosen and carried is not None:
                    view.add_(carried)
                elif keep and carried is not None:
                    view.copy_(carried)
                self._buffers.parameters[index].grad = (
                    view if index in chosen or (keep and carried is not None) else None
                )
        self._carried.clear()
