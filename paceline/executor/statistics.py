"""The few numbers that ranks must agree on after a backward pass, summed in one small all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.comm.read_later import ReadLater
from paceline.core.buffers import CHECKS, USER_SUMS
from paceline.core.errors import EngineError
from paceline.tensors.reduced_norm import ReducedNorm


class Statistics:
    """One fp64 vector: which parameters got a gradient, whose was incomplete, the gradients' norms, and a loop's sums.

    Attributes:
        buffer: What is reduced: (`statistics_numel(parameters)`,), fp64.
        asks_later: Whether the host learns one step later whether ranks saw a step alike, as on a GPU.
    """

    def __init__(self, parameters: int, world_size: int, buffer: Tensor) -> None:
        """Takes the vector's memory.

        Args:
            parameters: Number of parameters.
            world_size: Number of ranks.
            buffer: Of `statistics_numel(parameters)` elements.
        """
        self.buffer = buffer
        self.asks_later = buffer.is_cuda
        self._later = ReadLater()
        self._parameters, self._world_size = parameters, world_size
        self._buffers = 0
        self._norms = buffer[:0]
        self._values: list[float | Tensor] = []
        self._result = torch.zeros(USER_SUMS, dtype=torch.float64, device=buffer.device)
        self._counted: int | Tensor = 0
        """Of the result: how many sums it has; or, where this rank gave none, what tells how many others gave."""
        self._flags = buffer[: 2 * parameters].clone()
        self._written: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    def add(self, values: Sequence[float | Tensor]) -> None:
        """Adds to the running sums; every call of a step gives the same number of values.

        Raises:
            ValueError: More values than fit, or not as many as before.
        """
        if len(values) > USER_SUMS or (self._values and len(values) != len(self._values)):
            raise ValueError(f"count: expected {len(self._values) or f'up to {USER_SUMS}'} values, got {len(values)}")
        if not self._values:
            self._values = [0.0] * len(values)
        detached = [v.detach().double() if isinstance(v, Tensor) else v for v in values]
        self._values = [total + value for total, value in zip(self._values, detached, strict=True)]

    def fill(
        self,
        used: Iterable[int],
        incomplete: Iterable[int],
        norms: Tensor,
        checks: Sequence[int],
        buffers: int = 0,
    ) -> None:
        """Writes this rank's numbers into the vector that is about to be reduced.

        Args:
            used: Parameters that have a gradient.
            incomplete: Those whose gradient was not complete when their unit's backward was over.
            norms: Of what this rank will hold of each trainable parameter's gradient, fp64, if it is not all of it.
            checks: The number of the micro-batch, a hash of the collectives launched and one of the weights where
                another rank updates these: alike on all ranks.
            buffers: How many buffers were changed that ranks have not agreed to send.
        """
        wanted = (frozenset(used), frozenset(incomplete))
        if wanted != self._written:
            # Rarely: the flags stay on the device, so that a GPU's host need not copy them in every step.
            flags = torch.zeros(2 * self._parameters, dtype=torch.float64)
            flags[[*wanted[0], *(self._parameters + index for index in wanted[1])]] = 1.0
            self._flags.copy_(flags)
            self._written = wanted
        first, own = 2 * self._parameters, 3 * self._parameters
        self.buffer[:first].copy_(self._flags)
        self.fill_norms(norms)
        numbers: list[float | Tensor] = [0.0] * (USER_SUMS + 3 + 2 * CHECKS)
        numbers[: len(self._values)] = self._values
        numbers[USER_SUMS] = float(buffers)
        numbers[USER_SUMS + 1 : USER_SUMS + 3] = [float(len(self._values)), float(len(self._values)) ** 2]
        for place, check in enumerate(checks):
            numbers[USER_SUMS + 3 + 2 * place : USER_SUMS + 5 + 2 * place] = [float(check), float(check) ** 2]
        self._buffers = buffers
        on_device = {
            own + place: number
            for place, number in enumerate(numbers)
            if isinstance(number, Tensor) and number.device.type != "cpu"
        }
        # What the host knows goes in one piece, from memory that a GPU reads by itself: a host that assigns a number to
        # an element of a GPU's tensor waits for the GPU.
        known = [0.0 if own + place in on_device else float(number) for place, number in enumerate(numbers)]
        host = torch.tensor(known, dtype=torch.float64, pin_memory=self.buffer.is_cuda)
        self.buffer[own:].copy_(host, non_blocking=True)
        for place, value in on_device.items():
            self.buffer[place].copy_(value)

    def require_alike(self) -> None:
        """Refuses a step that ranks see differently; on a GPU when the next one is about to be published.

        Raises:
            EngineError: They do.
        """
        checks = self.buffer[-2 * CHECKS :]
        if not self.asks_later:
            self._judge(checks.tolist())
            return
        earlier = self._later.exchange(checks)
        if earlier is not None:
            self._judge(earlier.tolist())

    def _judge(self, sums: Sequence[float]) -> None:
        causes = (
            "ranks had different numbers of micro-batches in this step, so their gradients would be of different "
            "sizes: give every rank as many, or let pl.accumulate(model, batches, uneven=True) count them over ranks",
            "ranks ran units or collectives in different orders in this step, so buffers of one size would be mixed: "
            "let every rank run the same units in the same order",
            "ranks computed this step with different weights: with collective=parameter_server rank 0 alone has "
            "gradients and optimizer states, so what a loop makes of these (weights swapped for their average, a step "
            "by hand) happens on rank 0 alone. Set strategy.collective to all_reduce, or change weights alike on every "
            "rank",
        )
        for place, cause in enumerate(causes):
            total, squares = sums[2 * place : 2 * place + 2]
            # The variance is 0 where all are alike; both are whole numbers below 2**53.
            if self._world_size * squares != total * total:
                raise EngineError(cause)

    def squares(self) -> Tensor:
        """Sums of squares of the gradients over all ranks' shards: (trainable parameters,), fp64."""
        first = 2 * self._parameters
        return self.buffer[first : first + len(self._norms)]

    def fill_norms(self, norms: Tensor) -> Tensor:
        """Writes this rank's norms anew, as gradients have been reduced once more; returns `squares`, to be summed."""
        self._norms = norms
        return self.squares().copy_(norms.square())

    def norms(self, indices: Sequence[int], replicas: int) -> dict[int, ReducedNorm]:
        """Returns what is known of the gradients' norms, by index; nothing where this rank has all of them.

        Args:
            indices: Trainable parameters.
            replicas: How many ranks have the same shards.
        """
        whole = (self.squares() / replicas).sqrt()
        return dict(zip(indices, map(ReducedNorm, self._norms.unbind(), whole.unbind()), strict=False))

    def used(self) -> list[int]:
        """Parameters that some rank has a gradient for. On a GPU the host waits for the answer."""
        return self.buffer[: self._parameters].nonzero().flatten().tolist()

    def incomplete(self, mine: Sequence[int], first: bool) -> list[int]:
        """Returns the parameters whose gradient was incomplete on some rank when their unit's backward was over.

        Args:
            mine: Those of this rank.
            first: Whether this is the first step. On a GPU only then the other ranks' are read, as that makes the
                host wait; which parameters these are follows from the model, not from the data.
        """
        if self.buffer.is_cuda and not first:
            return list(mine)
        flags = self.buffer[self._parameters : 2 * self._parameters]
        return flags.nonzero().flatten().tolist()

    def changes_buffers(self, first: bool) -> bool:
        """Whether some rank has changed buffers that ranks have not agreed to send; see `incomplete`."""
        if self.buffer.is_cuda and not first:
            return bool(self._buffers)
        return bool(self.buffer[3 * self._parameters + USER_SUMS] > 0)

    def clear(self) -> None:
        """Drops the running sums."""
        self._values = []

    def close(self) -> None:
        """Ends a synchronised micro-batch: the sums are the result, and new ones begin."""
        device = self.buffer.device
        if self._world_size > 1:
            numbers = self.buffer[3 * self._parameters :].clone()
            self._result = numbers[:USER_SUMS]
            self._counted = len(self._values) or numbers[USER_SUMS + 1 : USER_SUMS + 3]
        else:
            self._counted = len(self._values)
            # Filled in on the device: to copy a number there a GPU's host would wait.
            values = [
                value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=device)
                for value in self._values
            ]
            self._result = torch.stack(values) if values else self.buffer[:0].clone()
        self.clear()

    def result(self) -> Tensor:
        """The sums over micro-batches and ranks at the last synchronised backward.

        A rank that gave none, as it had no micro-batch, has the others'. On a GPU its host waits for their number.
        """
        if isinstance(self._counted, Tensor):
            numbers, squares = self._counted.tolist()
            # Of k ranks that each gave n, k n and k n².
            self._counted = round(squares / numbers) if numbers else 0
        return self._result[: self._counted]
