"""The few numbers that ranks must agree on after a backward pass, summed in one small all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.comm.transport import Transport
from paceline.engine.gradients import square_sum

_USER_VALUES = 8


class Counts:
    """One fp64 vector: which parameters got a gradient, which got it late, and the training loop's own sums.

    Attributes:
        numel: Length of the vector.
        buffer: What is reduced.
        looks: Whether each rank looks at its own gradients, to tell whose are not finite.
    """

    def __init__(self, parameters: int, rank: int, device: torch.device, transport: Transport | None) -> None:
        """Allocates the vector; with a transport, a collective call.

        Args:
            parameters: Number of parameters.
            rank: This rank.
            device: Where the vector lives.
            transport: Reduces it; None with one rank.
        """
        self.numel = 2 * parameters + _USER_VALUES + 4
        self._parameters, self._rank = parameters, rank
        if transport is None:
            self.buffer = torch.zeros(self.numel, dtype=torch.float64, device=device)
        else:
            self.buffer = transport.allocate(self.numel, torch.float64)
        self._carries = False
        self.looks = False
        self._not_finite = torch.zeros((), dtype=torch.bool, device=device)
        self._culprits = self._own_culprits()
        self._values: list[float | Tensor] = []
        self._result = torch.zeros(0, dtype=torch.float64, device=device)
        self._flags = self.buffer[: 2 * parameters].clone()
        self._written: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    def add(self, values: Sequence[float | Tensor]) -> None:
        """Adds to the running sums; every call of a step gives the same number of values.

        Raises:
            ValueError: More values than fit, or not as many as before.
        """
        if len(values) > _USER_VALUES or (self._values and len(values) != len(self._values)):
            raise ValueError(
                f"count: expected {len(self._values) or f'up to {_USER_VALUES}'} values, got {len(values)}"
            )
        if not self._values:
            self._values = [0.0] * len(values)
        detached = [v.detach().double() if isinstance(v, Tensor) else v for v in values]
        self._values = [total + value for total, value in zip(self._values, detached, strict=True)]

    def look(self, gradients: Sequence[Tensor]) -> None:
        """Sees whether gradients of this rank alone are finite: a pass over them, which most steps can do without."""
        if gradients:
            self._not_finite = self._not_finite | ~torch.isfinite(square_sum(gradients))

    def fill(self, used: Iterable[int], late: Iterable[int], squares: Tensor | None, carries: bool) -> None:
        """Writes this rank's numbers into the vector that is about to be reduced.

        Args:
            used: Parameters that have a gradient.
            late: Those whose gradient came late.
            squares: Sum of squares of the reduced gradients that this rank alone holds, fp64, 0-dim.
            carries: Whether more will be added to the gradients.
        """
        wanted = (frozenset(used), frozenset(late))
        if wanted != self._written:
            # Rarely: the flags stay on the device, so that a GPU's host need not copy them in every step.
            flags = torch.zeros(2 * self._parameters, dtype=torch.float64)
            flags[[*wanted[0], *(self._parameters + index for index in wanted[1])]] = 1.0
            self._flags.copy_(flags)
            self._written = wanted
        self.buffer[: 2 * self._parameters].copy_(self._flags)
        self.buffer[2 * self._parameters :].zero_()
        for index, value in enumerate(self._values, 2 * self._parameters):
            self.buffer[index] = value
        self.buffer[-4:-2] = self._own_culprits()
        if squares is not None:
            self.buffer[-2] = squares
        self._carries = carries
        self.buffer[-1] = float(carries)

    def _own_culprits(self) -> Tensor:
        number = torch.ones_like(self._not_finite, dtype=torch.float64)
        seen = self._not_finite.double() if self.looks else -number
        return torch.stack([seen, self._not_finite * self._rank * number])

    def squares(self) -> Tensor | None:
        """Sum of squares of all reduced gradients: fp64, 0-dim; None where gradients are more than what was reduced."""
        # A GPU's host does not wait for the others' answer, which is its own: loops are alike on all ranks.
        carries = self._carries if self.buffer.is_cuda else self.buffer[-1].item()
        return None if carries else self.buffer[-2].clone()

    def used(self) -> list[int]:
        """Parameters that some rank has a gradient for. On a GPU the host waits for the answer."""
        return self.buffer[: self._parameters].nonzero().flatten().tolist()

    def late(self, mine: Sequence[int], first: bool) -> list[int]:
        """Parameters that some rank has a late gradient for.

        Args:
            mine: Those of this rank.
            first: Whether this is the first step. On a GPU only then the other ranks' are read, as that makes the
                host wait; which parameters are late follows from the model, not from the data.
        """
        if self.buffer.is_cuda and not first:
            return list(mine)
        flags = self.buffer[self._parameters : 2 * self._parameters]
        return flags.nonzero().flatten().tolist()

    def clear(self) -> None:
        """Drops the running sums."""
        self._values = []
        self._not_finite = torch.zeros_like(self._not_finite)

    def close(self, synchronised: bool, world_size: int) -> None:
        """Ends a micro-batch: after a synchronised one the sums are the result, and new ones begin."""
        if not synchronised:
            return
        if world_size > 1:
            start = 2 * self._parameters
            self._result = self.buffer[start : start + len(self._values)].clone()
            self._culprits = self.buffer[-4:-2].clone()
        else:
            values = [torch.as_tensor(value, dtype=torch.float64, device=self.buffer.device) for value in self._values]
            self._result = torch.stack(values) if values else self.buffer[:0].clone()
            self._culprits = self._own_culprits()
        self.clear()

    def result(self) -> Tensor:
        """The sums over micro-batches and ranks at the last synchronised backward."""
        return self._result

    def culprits(self) -> Tensor:
        """How many ranks saw their own gradients not finite in the step (negative: none looked), and their sum."""
        return self._culprits
