"""torch.distributed's own collectives, over Gloo and over NCCL, as peers in `paceline bench comm`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.bench.comm.calls import Call
from paceline.core.collectives.algorithms import ALGORITHMS


class TorchLibrary:
    """One backend of torch.distributed. Tensors are made once and used again."""

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device, most: int, dtype: torch.dtype):
        """Uses `group`, whose ranks hold two buffers of `most` elements each."""
        self.name = name
        self.algorithms = dict.fromkeys(ALGORITHMS, ("own",))
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._root = dist.get_rank(group) == 0
        self._device = device
        self._most = most
        self._dtype = dtype
        self._buffers: tuple[Tensor, Tensor] | None = None

    def call(self, op: str, algorithm: str, numel: int) -> Call:
        """See `Library.call`."""
        if self._buffers is None:
            first, second = (torch.zeros(self._most, dtype=self._dtype, device=self._device) for _ in range(2))
            self._buffers = first, second
        source, target = (buffer[:numel] for buffer in self._buffers)
        given, result, run = self._function(op, source, target)
        finish = partial(torch.cuda.synchronize, self._device) if self._device.type == "cuda" else None
        call = Call(given, result, run, self._barrier)
        return call if finish is None else Call(given, result, run, self._barrier, finish)

    def _barrier(self) -> None:
        dist.barrier(group=self._group)

    def _function(self, op: str, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Callable[[], object]]:
        """What is given, what results, and the function with these tensors."""
        group, size = self._group, source.numel() // self._ranks
        piece, into = source[:size], target[:size]
        if op == "barrier":
            return source, source, self._barrier
        if op == "all_reduce":
            return source, source, partial(dist.all_reduce, source, group=group)
        if op == "broadcast":
            return source, source, partial(dist.broadcast, source, group_src=0, group=group)
        if op == "reduce":
            return source, source, partial(dist.reduce, source, group_dst=0, group=group)
        if op == "reduce_scatter":
            return source, into, partial(dist.reduce_scatter_tensor, into, source, group=group)
        if op == "all_gather":
            return piece, target, partial(dist.all_gather_into_tensor, target, piece, group=group)
        if op == "all_to_all":
            return source, target, partial(dist.all_to_all_single, target, source, group=group)
        if op == "scatter":
            parts = list(source.chunk(self._ranks)) if self._root else None
            return source, into, partial(dist.scatter, into, parts, group_src=0, group=group)
        parts = list(target.chunk(self._ranks)) if self._root else None
        return piece, target, partial(dist.gather, piece, parts, group_dst=0, group=group)
