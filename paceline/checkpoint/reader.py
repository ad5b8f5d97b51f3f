"""Reads ranges of a checkpoint's tensors, straight into the memory that they are wanted in."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from paceline.checkpoint.manifest import BLOCK_BYTES, DamagedError, Part, Stored
from paceline.checkpoint.rank_file import as_bytes, checksums
from paceline.core.errors import UserError

READ_BYTES = 16 * BLOCK_BYTES
"""So much is read at once."""
_MOST_FILES = 64
"""That are open at once."""
_LENGTH_BYTES = 8
"""At the start of a safetensors file: how long its header is, in bytes, little-endian."""
_NO_DAMAGE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM)
"""Why a file that is whole may not be opened: an older checkpoint would be no better."""
_MOST_HEADER_BYTES = 100_000_000
"""As safetensors has it."""


class _Entry(msgspec.Struct):
    """What a safetensors file's header says of a tensor; offsets count from the header's end."""

    shape: list[int]
    data_offsets: tuple[int, int]


class _File(NamedTuple):
    """An open file of a rank."""

    descriptor: int
    size: int
    entries: dict[str, msgspec.Raw]
    start: int
    """Of its tensors' bytes."""


class Reader:
    """Reads ranges of a checkpoint's tensors: only the blocks that they touch, each checked.

    Files are read, not mapped: mapped ones count as this process's own memory where that is limited.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Stored]) -> None:
        """Opens nothing yet.

        Args:
            folder: The checkpoint's.
            tensors: Its manifest's.
        """
        self._folder, self._tensors = folder, tensors
        self._files: dict[str, _File] = {}
        self._under: dict[str, list[str]] = {}
        for name in tensors:
            self._under.setdefault(name[: name.rfind("/") + 1], []).append(name)
        weakref.finalize(self, _close, self._files)

    def under(self, prefix: str) -> list[str]:
        """The names that are a prefix, which ends with a slash, and one word."""
        return self._under.get(prefix, [])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        dtype: torch.dtype = getattr(torch, self._tensors[name].dtype)
        return dtype

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The elements [start, stop) of a tensor, in row-major order: one-dimensional, on the CPU.

        Raises:
            DamagedError: They are not what was written; names the file.
        """
        stop = self._tensors[name].numel if stop is None else stop
        result = torch.empty(stop - start, dtype=self.dtype(name), device="cpu")
        self.read_into(name, start, result)
        return result

    def read_into(self, name: str, start: int, target: Tensor) -> None:
        """Fills a one-dimensional tensor, of any dtype and device, with a tensor's elements from `start` on.

        Raises:
            DamagedError: They are not what was written; names the file. Some of the target may have been written.
        """
        stop = start + target.numel()
        for part in self._tensors[name].parts:
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                self._fill(target[first - start : last - start], name, part, first - part.start, last - part.start)

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
                self._fill(torch.empty(last - first, dtype=dtype, device="cpu"), name, part, first, last)
                yield (last - first) * dtype.itemsize

    def _fill(self, target: Tensor, name: str, part: Part, first: int, last: int) -> None:
        """Reads elements [first, last) of a part."""
        dtype, path, size = self.dtype(name), self._folder / part.file, part.stop - part.start
        # A single element counts as contiguous whatever its stride, but not as bytes.
        item, is_plain = dtype.itemsize, target.device.type == "cpu" and target.stride() == (1,)
        block = BLOCK_BYTES // item
        file, offset = self._locate(name, part, size * item)
        begin = first // block * block
        while begin < last:
            if begin < first or last < begin + block:
                # Of a block of which only a part is wanted all is read, and checked, elsewhere.
                end = min(begin + block, size)
            else:
                end = min(begin + READ_BYTES // item, last // block * block)
            low, high = max(begin, first), min(end, last)
            place = target[low - first : high - first]
            in_place = is_plain and target.dtype == dtype and (low, high) == (begin, end)
            values = place if in_place else torch.empty(end - begin, dtype=dtype, device="cpu")
            _read(path, file, offset + begin * item, as_bytes(values))
            if checksums(values) != part.checksums[begin // block : -(-end // block)]:
                raise DamagedError(_damaged(path, f"the checksum of {name} is wrong: some of it has changed"))
            if not in_place:
                place.copy_(values[low - begin : high - begin])
            begin = end

    def _locate(self, name: str, part: Part, size: int) -> tuple[_File, int]:
        """The file that holds a part, and where in it the part's bytes begin."""
        path = self._folder / part.file
        if part.file not in self._files:
            if len(self._files) >= _MOST_FILES:
                _close(self._files)
            self._files[part.file] = _open(path)
        file = self._files[part.file]
        if name not in file.entries:
            raise DamagedError(_damaged(path, f"{name} is not there"))
        try:
            entry = msgspec.json.decode(file.entries[name], type=_Entry)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedError(_damaged(path, f"what its header says of {name}: {error}")) from error
        (begin, end), numel = entry.data_offsets, part.stop - part.start
        if entry.shape != [numel]:
            raise DamagedError(_damaged(path, f"{name} has shape {entry.shape} there, not [{numel}]"))
        if begin < 0 or end - begin != size or file.start + end > file.size:
            raise DamagedError(_damaged(path, f"{name} has bytes {begin} to {end} of {file.size - file.start} there"))
        return file, file.start + begin


def _open(path: Path) -> _File:
    """Opens a file and reads its header.

    Raises:
        DamagedError: It is not there, or has none.
    """
    try:
        # Not waiting for whoever writes to a pipe that lies in the file's place.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NO_DAMAGE:
            raise UserError(f"{path} cannot be opened: {error.strerror}") from error
        raise DamagedError(_damaged(path, str(error))) from error
    try:
        if not stat.S_ISREG((found := os.fstat(descriptor)).st_mode):
            raise DamagedError(_damaged(path, "it is no file"))
        size = found.st_size
        file = _File(descriptor, size, {}, _LENGTH_BYTES)
        length = int.from_bytes(_piece(path, file, 0, _LENGTH_BYTES), "little")
        if length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise DamagedError(_damaged(path, f"its header has {length} bytes, of {size} in all"))
        header = _piece(path, file, _LENGTH_BYTES, length)
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        return file._replace(entries=entries, start=_LENGTH_BYTES + length)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        os.close(descriptor)
        raise DamagedError(_damaged(path, f"its header: {error}")) from error
    except BaseException:
        os.close(descriptor)
        raise


def _piece(path: Path, file: _File, offset: int, size: int) -> bytearray:
    data = bytearray(size)
    _read(path, file, offset, memoryview(data))
    return data


def _read(path: Path, file: _File, offset: int, target: memoryview) -> None:
    """Fills some memory from a place in a file.

    Raises:
        DamagedError: The file ends before, or the disk does not give it.
        MemoryError: The kernel has none.
    """
    done = 0
    while done < len(target):
        try:
            count = os.preadv(file.descriptor, [target[done:]], offset + done)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError(f"{path}: {error.strerror}") from error
            raise DamagedError(_damaged(path, str(error))) from error
        if not count:
            raise DamagedError(_damaged(path, f"it ends after {offset + done} bytes"))
        done += count


def _close(files: dict[str, _File]) -> None:
    while files:
        os.close(files.popitem()[1].descriptor)


def _damaged(path: Path, why: str) -> str:
    return f"{path} cannot be read: {why}. Load another checkpoint, or another copy of this one"
