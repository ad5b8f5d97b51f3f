"""What tests and their ranks send each other, tensors by value: to share their memory takes twenty times as long."""

from __future__ import annotations

import io
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor


def send(pipe: Connection, value: object) -> None:
    """Sends anything that can be pickled."""
    sink = io.BytesIO()
    _Pickler(sink).dump(value)
    pipe.send_bytes(sink.getbuffer())


def receive(pipe: Connection) -> Any:
    """What `send` has sent; raises EOFError where the other side is gone."""
    return ForkingPickler.loads(pipe.recv_bytes())


def _reduce(tensor: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return reduce_tensor(tensor)
    # Not `contiguous`, after which one element may have any stride.
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _rebuild, (type(tensor), data, tensor.dtype, tensor.shape, tensor.requires_grad and tensor.is_leaf)


def _rebuild(kind: type[Tensor], data: bytes, dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


class _Pickler(ForkingPickler):
    def __init__(self, sink: io.BytesIO) -> None:
        super().__init__(sink)
        self.dispatch_table.update(dict.fromkeys((Tensor, torch.nn.Parameter), _reduce))
