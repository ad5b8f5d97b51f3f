"""Writes safetensors files of tensors that are made one at a time, so that no more than one is ever in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""How the format spells dtypes."""


@dataclass(frozen=True)
class Lazy:
    """A tensor that is made when it is asked for.

    Attributes:
        name: What it is called in a file.
        dtype: A key of `DTYPES`.
        shape: Its whole shape.
        read: Returns it, on the CPU.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Sequence[Lazy]) -> None:
    """Writes a safetensors file that is not there yet, and sees it on the disk.

    Raises:
        OSError: It cannot be written, as where the disk is full.
    """
    # The format wants neither holes nor elements across their alignment.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("xb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in ordered:
            made = tensor.read()
            if made.dtype != tensor.dtype or made.numel() != math.prod(tensor.shape):
                raise AssertionError(f"{tensor.name} is {made.dtype} {list(made.shape)}, not as it was announced")
            file.write(made.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
