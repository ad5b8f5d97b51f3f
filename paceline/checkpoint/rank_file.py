"""One rank's file of a checkpoint: flat tensors, each block of them with a checksum."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.checkpoint.manifest import BLOCK_BYTES, Part, Stored
from paceline.core.errors import UserError

READ_BYTES = 16 * BLOCK_BYTES
"""So much is read at once, and so much more memory than its result does a read take."""


class DamagedError(UserError):
    """What is read is not what was written."""


def file_name(rank: int) -> str:
    """Of what a rank writes."""
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


def sync(path: Path) -> None:
    """Sees that a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksums(tensor: Tensor) -> tuple[int, ...]:
    """The CRC-32 of each block of a one-dimensional tensor on the CPU, which finds what happens by accident."""
    data = tensor.contiguous().view(torch.uint8).numpy().data
    return tuple(zlib.crc32(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES))


class Reader:
    """Reads ranges of a checkpoint's tensors: only the blocks that they touch, each checked."""

    def __init__(self, folder: Path, tensors: Mapping[str, Stored]) -> None:
        """Opens nothing yet.

        Args:
            folder: The checkpoint's.
            tensors: Its manifest's.
        """
        self._folder, self._tensors = folder, tensors
        self._files: dict[str, Any] = {}
        self._under: dict[str, list[str]] = {}
        for name in tensors:
            self._under.setdefault(name[: name.rfind("/") + 1], []).append(name)

    def under(self, prefix: str) -> list[str]:
        """The names that are a prefix, which ends with a slash, and one word."""
        return self._under.get(prefix, [])

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        dtype: torch.dtype = getattr(torch, self._tensors[name].dtype)
        return dtype

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The elements [start, stop) of a tensor, in row-major order: one-dimensional, on the CPU.

        Raises:
            DamagedError: They are not what was written; names the file.
        """
        stored = self._tensors[name]
        stop = stored.numel if stop is None else stop
        result = torch.empty(stop - start, dtype=self.dtype(name))
        for part in stored.parts:
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                self._fill(result[first - start : last - start], name, part, first - part.start, last - part.start)
        return result

    def verify(self, name: str) -> Iterator[int]:
        """Reads all of a tensor, and yields the bytes of each part when it was right.

        Raises:
            DamagedError: It is not what was written; names the file.
        """
        dtype = self.dtype(name)
        for part in self._tensors[name].parts:
            step = READ_BYTES // dtype.itemsize
            for first in range(0, part.stop - part.start, step):
                last = min(first + step, part.stop - part.start)
                self._fill(torch.empty(last - first, dtype=dtype), name, part, first, last)
                yield (last - first) * dtype.itemsize

    def _fill(self, target: Tensor, name: str, part: Part, first: int, last: int) -> None:
        """Reads elements [first, last) of a part."""
        item, path = target.dtype.itemsize, self._folder / part.file
        block, size = BLOCK_BYTES // item, part.stop - part.start
        try:
            view = self._open(part.file).get_slice(name)
            if view.get_shape() != [size]:
                raise DamagedError(_damaged(path, f"{name} has shape {view.get_shape()} there, not [{size}]"))
            begin = first // block * block
            while begin < last:
                end = min(begin + READ_BYTES // item, -(-last // block) * block, size)
                values = view[begin:end]
                if values.dtype != target.dtype:
                    raise DamagedError(_damaged(path, f"{name} is {values.dtype} there, not {target.dtype}"))
                if checksums(values) != part.checksums[begin // block : -(-end // block)]:
                    raise DamagedError(_damaged(path, f"the checksum of {name} is wrong: some of it has changed"))
                low, high = max(begin, first), min(end, last)
                target[low - first : high - first] = values[low - begin : high - begin]
                begin = end
        except (OSError, SafetensorError) as error:
            raise DamagedError(_damaged(path, str(error))) from error

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._folder / name, framework="pt")
        return self._files[name]


def _damaged(path: Path, why: str) -> str:
    return f"{path} cannot be read: {why}. Load another checkpoint, or another copy of this one"


def _standalone(tensor: Tensor) -> Tensor:
    """A tensor that fills its storage, as the format wants it."""
    filled = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
    return tensor if filled and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
