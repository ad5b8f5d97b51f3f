"""Norms of each parameter's gradient in a step: of this rank's own before reductions, and of what it has then."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradientNorms:
    """2-norms of one rank's gradients in a step, by slot of the layout; None where there is no gradient.

    Attributes:
        local: Of each micro-batch that was reduced, in order: the rank's own before that.
        reduced: After the last reduction: of the whole gradient, or this rank's shard.
    """

    local: list[list[float | None]]
    reduced: list[float | None]


class NormRecords:
    """Takes norms where gradients lie at that moment; the host reads them when the step is over, and waits then alone.

    Attributes:
        is_on: Whether norms are taken. Nothing is done otherwise.
        keeps: Whether local gradients of the latest micro-batch are copied, too.
    """

    def __init__(self, parameters: int) -> None:
        """Takes none yet.

        Args:
            parameters: Of the model.
        """
        self.is_on = self.keeps = False
        self._copies: dict[int, Tensor] | None = None
        self._parameters, self._micro_batch = parameters, 0
        self._local: list[tuple[int, Sequence[int], Tensor]] = []
        self._omitted: set[tuple[int, int]] = set()
        self._reduced: list[tuple[Sequence[int], Tensor]] = []

    def record(self, on: bool, keeps: bool) -> None:
        """Whether norms are taken from the next step on, and local gradients kept with them."""
        self.is_on, self.keeps = on, on and keeps

    def begin(self, micro_batch: int) -> None:
        """A backward begins; with the first of a step what there is of others is dropped."""
        self._micro_batch = micro_batch
        self._copies = {} if self.is_on and self.keeps else None
        if micro_batch == 0:
            self._local, self._reduced = [], []
            self._omitted.clear()

    def add_local(self, gradients: dict[int, Tensor]) -> None:
        """These are about to be reduced."""
        self._local += [(self._micro_batch, indices, norms) for indices, norms in _norms(gradients)]
        if self._copies is not None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._copies |= {index: gradient.clone() for index, gradient in gradients.items()}

    def omit(self, indices: Collection[int]) -> None:
        """Leaves norms of these parameters out for this micro-batch: more came after they were taken."""
        if self.is_on:
            self._omitted.update((self._micro_batch, index) for index in indices)
            self._copies = None if indices else self._copies

    def take_reduced(self, gradients: dict[int, Tensor]) -> None:
        """These were reduced."""
        self._reduced = _norms(gradients)

    def take(self) -> dict[int, Tensor] | None:
        """Copies of the last micro-batch's local gradients, by slot, once; None if more came after that."""
        copies, self._copies = self._copies, None
        # Complex numbers' products are none of what a norm consists of.
        return None if copies is None or any(map(torch.is_complex, copies.values())) else copies

    def read(self) -> GradientNorms | None:
        """Norms of the latest step; None if none were taken to its end. On a GPU the host waits for them."""
        if not self._reduced and not self._local:
            return None
        numbers = sorted({micro_batch for micro_batch, *_ in self._local})
        local: dict[int, list[float | None]] = {number: [None] * self._parameters for number in numbers}
        reduced: list[float | None] = [None] * self._parameters
        parts = [*(norms for *_, norms in self._local), *(norms for _, norms in self._reduced)]
        values = iter(torch.cat(parts).tolist())
        for micro_batch, indices, _ in self._local:
            for index in indices:
                value = next(values)
                local[micro_batch][index] = None if (micro_batch, index) in self._omitted else value
        for indices, _ in self._reduced:
            for index in indices:
                reduced[index] = next(values)
        return GradientNorms([local[number] for number in numbers], reduced)


def _norms(gradients: dict[int, Tensor]) -> list[tuple[Sequence[int], Tensor]]:
    """For gradients of each dtype: which parameters' they are, and fp64 (as many,) their norms."""
    found: list[tuple[Sequence[int], Tensor]] = []
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients.values()):
            indices = [index for index, gradient in gradients.items() if gradient.dtype == dtype]
            # Squares of low precision's numbers are out of its range.
            wide = torch.promote_types(dtype, torch.float32)
            norms = torch._foreach_norm([gradients[index] for index in indices], 2, wide)
            found.append((indices, torch.stack(norms).double()))
    return found
