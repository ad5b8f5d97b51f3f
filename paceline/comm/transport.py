"""What the engine asks of a transport."""

from __future__ import annotations

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

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat buffer that is the same memory on every rank. A collective call.

        Raises:
            UserError: These ranks cannot share memory.
        """
        ...

    def run(
        self,
        collective: str,
        buffer: Tensor,
        label: str,
        scale: float = 1.0,
        shard: Tensor | None = None,
        once: bool = False,
    ) -> Traffic:
        """Runs one collective in place and returns when this rank's part is complete.

        Args:
            collective: Name of a collective, or with an algorithm of it: see `algorithms.find_plan`.
            buffer: Contiguous, one dimension, the same size and dtype on every rank.
            label: Names the op in errors.
            scale: Factor for sums, applied once to the finished sum.
            shard: This rank's shard, of size `buffer.numel() / ranks`, where it does not lie in the buffer: what
                all_gather sends (from `allocate`, of the buffer's dtype), what reduce_scatter fills (of any float
                dtype; the sum is rounded to it once). The buffer of a reduce_scatter is from `allocate`.
            once: Whether the buffer is given up afterwards, so that nothing of the call should be kept for the next.

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
