"""Checksums of a file's blocks: whether what is read is what was written.

A CRC-32 finds what disks, memory and other programs do to a file by accident; nobody can be kept from doing it on
purpose.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK = 128 << 10
"""Bytes: what a kernel reads around a page that is asked for anyway, so that checking costs a disk nothing."""


def block_count(size: int) -> int:
    """Number of blocks of so many bytes, the last of which may be short."""
    return -(-size // BLOCK)


def checksums(path: Path) -> NDArray[np.uint32]:
    """The CRC-32 of each block of a file, shape (blocks,)."""
    with path.open("rb") as file:
        return np.fromiter((zlib.crc32(block) for block in iter(lambda: file.read(BLOCK), b"")), np.uint32)


class Blocks:
    """The blocks of bytes that are mapped from a file, each checked when it is first used."""

    def __init__(self, data: NDArray[np.uint8], expected: NDArray[np.uint32]) -> None:
        """Checks nothing yet.

        Args:
            data: the file's bytes, shape (size,).
            expected: their `checksums`.
        """
        self._data = data
        self._expected = expected
        self._checked = np.zeros(len(expected), bool)

    def damaged(self, first: int, end: int) -> int | None:
        """The first byte of a block that is not what was written, among those that hold bytes [first, end)."""
        for block in range(first // BLOCK, block_count(end)):
            if not self._checked[block]:
                start = block * BLOCK
                if zlib.crc32(self._data[start : start + BLOCK].data) != self._expected[block]:
                    return start
                self._checked[block] = True
        return None
