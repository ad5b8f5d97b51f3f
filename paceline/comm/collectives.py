"""Collectives on tensors of the CPU, each by any of its algorithms.

Every rank calls the same function with a tensor of the same size and dtype. Tensors are contiguous; where a collective
cuts one up, rank r's chunk is the r-th of N contiguous ones, sizes differing by at most one element (`rounds.chunk`).
Everything happens in place. Tensors of any dtype can be moved, those of `SUMMED` added up too.

An algorithm is one of `algorithms.ALGORITHMS[collective]`, "hierarchical" where `algorithms.HIERARCHICAL` has the
collective, or "auto": the fastest by what messages and bytes were measured to cost, as `why` explains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.connect import open_transport
from paceline.comm.cpu.transport import CpuTransport
from paceline.comm.world import World, current_world
from paceline.core.collectives.algorithms import REDUCTIONS
from paceline.core.collectives.choice import Choice
from paceline.core.collectives.rounds import Traffic
from paceline.core.errors import UserError

SUMMED = frozenset(
    (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
)
"""What can be added up: bf16 and fp16 in fp32, the others as they are, integers modulo their range."""

_opened: tuple[World, CpuTransport] | None = None


def broadcast(tensor: Tensor, algorithm: str = "auto", root: int = 0) -> Traffic:
    """The root's tensor to every rank."""
    return _run("broadcast", tensor, algorithm, root=root)


def reduce(tensor: Tensor, algorithm: str = "auto", scale: float = 1.0, root: int = 0) -> Traffic:
    """`scale` times the sum of all ranks' tensors to the root; what others hold after it is undefined."""
    return _run("reduce", tensor, algorithm, scale, root)


def all_reduce(tensor: Tensor, algorithm: str = "auto", scale: float = 1.0) -> Traffic:
    """`scale` times the sum of all ranks' tensors to every rank."""
    return _run("all_reduce", tensor, algorithm, scale)


def scatter(tensor: Tensor, algorithm: str = "auto", root: int = 0) -> Traffic:
    """Sends chunk r of the root's tensor to chunk r of rank r's; the rest of the tensor is undefined after it."""
    return _run("scatter", tensor, algorithm, root=root)


def gather(tensor: Tensor, algorithm: str = "auto", root: int = 0) -> Traffic:
    """Chunk r of every rank r to the root; what others hold elsewhere is undefined after it."""
    return _run("gather", tensor, algorithm, root=root)


def all_gather(tensor: Tensor, algorithm: str = "auto") -> Traffic:
    """Chunk r of every rank r to every rank."""
    return _run("all_gather", tensor, algorithm)


def reduce_scatter(tensor: Tensor, algorithm: str = "auto", scale: float = 1.0) -> Traffic:
    """`scale` times the sum of all ranks' chunks r to rank r; the rest of the tensor is undefined after it."""
    return _run("reduce_scatter", tensor, algorithm, scale)


def all_to_all(tensor: Tensor, algorithm: str = "auto") -> Traffic:
    """Each rank's chunk j becomes chunk r of rank j.

    Raises:
        UserError: The number of ranks does not divide the tensor.
    """
    ranks = current_world().world_size
    if tensor.numel() % ranks:
        raise UserError(f"all_to_all: {ranks} ranks cannot cut {tensor.numel()} elements into equal chunks; pad them")
    return _run("all_to_all", tensor, algorithm)


def barrier(algorithm: str = "auto") -> Traffic:
    """Returns when every rank has called it."""
    return _run("barrier", torch.zeros(1), algorithm)


def why(collective: str, size: int) -> Choice:
    """Which algorithm "auto" takes for a tensor of `size` bytes and why; printable. Every rank calls it."""
    return _transport().why(collective, size)


def _run(collective: str, tensor: Tensor, algorithm: str, scale: float = 1.0, root: int = 0) -> Traffic:
    ranks = current_world().world_size
    if not 0 <= root < ranks:
        raise UserError(f"{collective}: expected a root from 0 to {ranks - 1}, got {root}")
    if tensor.device.type != "cpu":
        raise UserError(
            f"{collective}: expected a tensor on the CPU, got one on {tensor.device}; torch.distributed's are for GPUs"
        )
    if not tensor.is_contiguous():
        raise UserError(f"{collective}: expected a contiguous tensor; pass a copy (`.contiguous()`) and copy it back")
    if collective in REDUCTIONS and tensor.dtype not in SUMMED:
        raise UserError(
            f"{collective}: {tensor.dtype} cannot be added up; pass a copy in a dtype that can, such as int32"
        )
    if scale != 1.0 and not (tensor.is_floating_point() or tensor.is_complex()):
        raise UserError(f"{collective}: scale={scale} does not go with {tensor.dtype}; leave it out and divide the sum")
    flat = tensor.detach().view(-1)
    if ranks == 1:
        if scale != 1.0:
            flat.mul_(scale)
        return Traffic(0, 0)
    try:
        return _transport().run(f"{collective}/{algorithm}" + (f"@{root}" if root else ""), flat, "tensor", scale)
    except ValueError as error:
        raise UserError(str(error)) from None


def _transport() -> CpuTransport:
    global _opened
    world = current_world()
    if _opened is None or _opened[0] is not world:
        transport = open_transport(world)
        if not isinstance(transport, CpuTransport):
            raise UserError("paceline's own collectives move memory of the CPU: pl.init(device='cpu')")
        _opened = (world, transport)
    return _opened[1]
