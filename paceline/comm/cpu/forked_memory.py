"""What a forked process writes where ranks share memory stays its own, as all else that it writes does."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

from paceline.comm.cpu.shared_memory import NAME
from paceline.core.uncollected import uncollected

_FIXED = 0x10
"""MAP_FIXED: takes the place of what is mapped there."""


@uncollected()  # what were freed meanwhile would be mapped again, over whatever has come there since
def make_private() -> None:
    """Maps all memory that ranks share anew in this process, at the same addresses: pages are copied once written.

    So a child's backward or update, which nobody carries out together with it, leaves its rank's parameters and
    gradients as they are. Nothing is read or copied here, however large the memory is.

    Raises:
        OSError: The system refuses.
    """
    regions = re.findall(
        rf"^(\w+)-(\w+) rw-s (\w+) \S+ (\d+)\s+/memfd:{NAME} ", Path("/proc/self/maps").read_text(), re.M
    )
    if not regions:
        return
    descriptors = _descriptors()
    map_memory = ctypes.CDLL(None, use_errno=True).mmap
    map_memory.restype = ctypes.c_void_p
    map_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    for first, last, offset, inode in regions:
        start, size = int(first, 16), int(last, 16) - int(first, 16)
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED
        if map_memory(start, size, access, flags, descriptors.get(int(inode), -1), int(offset, 16)) != start:
            raise OSError(ctypes.get_errno(), "memory that ranks share cannot be made a forked process's own")


def _descriptors() -> dict[int, int]:
    """This process's descriptors of such memory, by inode: Python keeps one for each mapping."""
    found = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{NAME} "):
                found[os.fstat(descriptor).st_ino] = descriptor
        except OSError:
            continue  # the one of the listing itself
    return found
