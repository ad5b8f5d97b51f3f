"""What the engine asks of a transport, and the sum in rank order that the CPU transports share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.plan import Traffic


class CommunicationError(RuntimeError):
    """A collective failed: a peer vanished, stopped answering, or called something else."""


class Transport(Protocol):
    """Moves flat buffers between the ranks of one group, one collective at a time."""

    name: str

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat buffer that `run` moves without staging. A collective call: every rank makes it."""
        ...

    def run(
        self, collective: str, buffer: Tensor, label: str, scale: float = 1.0, shard: Tensor | None = None
    ) -> Traffic:
        """Runs one collective in place and returns when this rank's part is complete.

        Args:
            collective: Key of `plan.PLANS`.
            buffer: Contiguous, one dimension, the same size and dtype on every rank.
            label: Names the op in errors.
            scale: Factor for sums, applied once to the finished sum.
            shard: This rank's shard, of size `buffer.numel() / ranks`, where it does not lie in the buffer: what
                all_gather sends (from `allocate`, of the buffer's dtype), what reduce_scatter fills (of any float
                dtype; the sum is rounded to it once). The buffer of a reduce_scatter is from `allocate`.

        Returns:
            Bytes that this rank sent and received.

        Raises:
            CommunicationError: A peer vanished, timed out or called something else.
        """
        ...

    def inherit(self, other: Transport) -> None:
        """Takes over the buffers that a transport between the same ranks, which is closed, allocated."""
        ...

    def interrupt(self) -> None:
        """Wakes a thread that waits for a peer in `run`, where that can be done; nothing can be run any more."""
        ...

    def close(self) -> None:
        """Releases connections. Buffers stay valid for this rank."""
        ...


CHUNK = 1 << 16
"""Elements summed at a time, so that scaling and accumulating find them in the core's own cache."""


def sum_in_order(out: Tensor, parts: Sequence[Tensor], scratch: Tensor, scale: float) -> None:
    """Out = scale * (parts[0] + parts[1] + ...), in that order, whatever `out` aliases.

    The order of the additions is fixed for each element, so that the sum does not depend on how a buffer
    was cut. bf16 and fp16 accumulate in fp32.

    Args:
        out: One dimension; may be one of `parts`.
        parts: Two or more tensors of the shape of `out` and of one dtype.
        scratch: At least `CHUNK` elements of the dtype to accumulate in (`accumulation_dtype`).
        scale: Factor applied to the sum.
    """
    direct = scratch.dtype == out.dtype
    for start in range(0, out.numel(), CHUNK):
        pieces = [part[start : start + CHUNK] for part in parts]
        target = out[start : start + CHUNK]
        total = scratch[: target.numel()]
        if direct and len(pieces) == 2 and pieces[0].dtype == out.dtype:
            torch.add(pieces[0], pieces[1], out=target)
        else:
            total.copy_(pieces[0])
            for piece in pieces[1:-1]:
                total.add_(piece)
            if direct:
                torch.add(total, pieces[-1], out=target)
            else:
                # Scaled before it is rounded: a mean may fit where the sum does not.
                target.copy_(total.add_(pieces[-1]).mul_(scale))
        if scale != 1.0 and direct:
            target.mul_(scale)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a sum of `dtype` is accumulated."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
