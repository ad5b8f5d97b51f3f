"""NCCL's own collectives, for ranks that hold a GPU each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from paceline.comm.transport import Transport
from paceline.core.collectives.algorithms import traffic
from paceline.core.collectives.rounds import Traffic
from paceline.core.errors import UserError

# Torch 2.13 calls them so, and warns of the names before, which is all that 2.11 knows.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def is_of_nccl(error: BaseException) -> bool:
    """Whether an error is NCCL's, and not about how ranks meet."""
    return isinstance(error, dist.DistBackendError) or "NCCL" in str(error)


def last_words(error: BaseException) -> str:
    """What NCCL itself said last, such as that two ranks have the same GPU: torch puts where it was before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "Last error:" in lines[:-1]:
        return lines[lines.index("Last error:") + 1].rstrip(".")
    return " ".join(lines[:2]).rstrip(".") or type(error).__name__


def abort_process_group() -> None:
    """Ends all process groups of this rank, whatever others do. Nothing that is under way has a result."""
    distributed_c10d._abort_process_group()


class NcclTransport:
    """Calls the vendor's collectives on the current CUDA stream.

    NCCL does not tell which algorithm it ran, so the traffic it reports is the ring's, which for large buffers
    is also its choice.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, owns: bool = True) -> None:
        """Uses a process group between this rank and others.

        Args:
            group: Serves this transport alone, or transports whose collectives all ranks call in one order.
            device: This rank's GPU.
            owns: Whether the group ends with this transport.
        """
        self.name = "nccl"
        self._group, self._owns = group, owns
        self._device = device
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat buffer on this rank's GPU."""
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Not possible: every GPU has memory of its own."""
        raise UserError("strategy.share_parameters: GPUs have memory of their own each; leave share_parameters out")

    def run(
        self,
        collective: str,
        buffer: Tensor,
        label: str,
        scale: float = 1.0,
        shard: Tensor | None = None,
        once: bool = False,
    ) -> Traffic:
        """Enqueues one collective on the current stream; see `Transport.run`."""
        # Which algorithm is NCCL's to choose.
        collective = collective.partition("/")[0]
        size = buffer.numel() // self._world_size
        own = buffer[self._rank * size : (self._rank + 1) * size]
        if collective == "all_gather":
            _all_gather(buffer, own if shard is None else shard, group=self._group)
        elif collective == "reduce_scatter":
            same = shard is not None and shard.dtype == buffer.dtype
            out = shard if shard is not None and same else own
            _reduce_scatter(out, buffer, self._operation(scale, buffer), group=self._group)
            if shard is not None and not same:
                shard.copy_(out)
        elif collective in ("all_reduce", "barrier"):
            # NCCL has no barrier: none has the sum of a token before all ranks have come.
            dist.all_reduce(buffer, self._operation(scale, buffer), group=self._group)
        elif collective == "reduce":
            dist.reduce(buffer, op=self._operation(scale, buffer), group_dst=0, group=self._group)
        elif collective == "broadcast":
            dist.broadcast(buffer, group_src=0, group=self._group)
        else:
            raise ValueError(f"{collective} of {label}: not a collective that NCCL is asked for")
        sent, received = traffic(collective, self._rank, self._world_size, buffer.numel())
        return Traffic(sent * buffer.itemsize, received * buffer.itemsize)

    def _operation(self, scale: float, buffer: Tensor) -> Any:
        """How to sum the buffer times a scale. Each rank's part is scaled before: in fp16 sums overflow."""
        if scale == 1.0:
            return dist.ReduceOp.SUM
        if scale == 1 / self._world_size:
            return dist.ReduceOp.AVG
        if self._world_size > 1 and buffer.dtype != torch.bfloat16:
            return dist._make_nccl_premul_sum(scale)  # type: ignore[attr-defined]
        # Torch hands NCCL the first half of a float32's bytes for a factor of bf16, which is 0 for every power of two
        # (pytorch issue 190745), and among one rank a reduce-scatter leaves the factor out.
        buffer.mul_(scale)
        return dist.ReduceOp.SUM

    def inherit(self, other: Transport) -> None:
        """See `Transport.inherit`: buffers belong to this process alone."""

    def saved_residuals(self) -> list[tuple[Any, Tensor]]:
        """Nothing: messages are sent as they are."""
        return []

    def load_residuals(self, saved: list[tuple[Any, Tensor]]) -> None:
        """See `saved_residuals`."""

    def abort(self, reason: str = "") -> None:
        """Not possible: a wait for a peer ends with the group's time limit."""

    def close(self) -> None:
        """Ends the process group, if it is this transport's. Between GPUs a collective call."""
        if self._owns and dist.is_initialized():
            dist.destroy_process_group(self._group)
