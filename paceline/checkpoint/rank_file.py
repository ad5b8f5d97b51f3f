"""One rank's file of a checkpoint: flat tensors, each block of them with a checksum."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paceline.checkpoint.folder import sync
from paceline.checkpoint.manifest import BLOCK_BYTES


def file_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def write_rank_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors to a file that is not there yet, and sees them on the disk.

    Args:
        path: The file.
        tensors: One-dimensional, on the CPU, none of them a part of another.

    Raises:
        OSError: It cannot be written, as where the disk is full.
    """
    # An empty file shows which rights the umask leaves: safetensors makes files that nobody else can read.
    path.touch(exist_ok=False)
    rights = path.stat().st_mode
    try:
        save_file({name: _standalone(tensor) for name, tensor in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(rights)
    sync(path)


def checksums(tensor: Tensor) -> tuple[int, ...]:
    """The CRC-32 of each block of a one-dimensional tensor on the CPU, which finds what happens by accident."""
    data = as_bytes(tensor.contiguous())
    return tuple(zlib.crc32(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES))


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a one-dimensional, contiguous tensor on the CPU."""
    data: memoryview = tensor.view(torch.uint8).numpy().data
    return data


def _standalone(tensor: Tensor) -> Tensor:
    """A tensor that fills its storage, as the format wants it."""
    filled = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
    return tensor if filled and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
