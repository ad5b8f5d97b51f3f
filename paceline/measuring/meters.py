"""What a benchmark reads from the operating system: memory of this process, bytes that its sockets sent."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from paceline.core.errors import UserError
from paceline.measuring.alive import AliveBytes

TCP_INFO = 11
BYTES_SENT = 200
"""Where Linux's struct tcp_info (include/uapi/linux/tcp.h) keeps tcpi_bytes_sent, a u64."""

_LOOK_SECONDS = 0.004


def held_bytes(device: torch.device) -> int:
    """Memory this process holds: its own pages and its part of shared ones on a CPU, what torch allocated on a GPU.

    A page of memory that ranks share counts in parts in each, so that the sum over ranks is what the host gives. Files
    that are mapped, such as libraries, do not count.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return pages("Anonymous") + pages("Pss_Shmem")


def pages(kind: str) -> int:
    """Bytes of this process's pages of a kind, as /proc/self/smaps_rollup names it."""
    found = re.search(rf"^{kind}:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    if found is None:
        raise UserError(f"this kernel does not tell what memory processes share ({kind}): Linux 5.4 or newer is needed")
    return int(found[1]) * 1024


@contextlib.contextmanager
def watching_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yields a function that tells the most that `held_bytes` was inside; on a CPU looked at every few ms.

    Raises:
        UserError: The kernel does not tell.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
        return
    peak, over = held_bytes(device), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(_LOOK_SECONDS):
            peak = max(peak, held_bytes(device))

    watcher = threading.Thread(target=watch, name="paceline bench memory", daemon=True)
    watcher.start()
    try:
        yield lambda: peak
    finally:
        over.set()
        watcher.join()


@contextlib.contextmanager
def watching_allocations(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yields a function that tells the most that was allocated at once inside, since it was last called.

    On a CPU tensors' memory, and that which ranks share, as it is when the function is called: neither what the C
    library keeps or cannot use, nor what libraries take for themselves. In one process it agrees with torch's profiler
    (`profile_memory`), which does not see what other threads free.

    Raises:
        UserError: The kernel does not tell.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

        def on_gpu() -> int:
            most: int = torch.cuda.max_memory_allocated(device) - before
            torch.cuda.reset_peak_memory_stats(device)
            return most

        yield on_gpu
        return
    before = pages("Pss_Shmem")
    with AliveBytes() as alive:

        def on_cpu() -> int:
            most: int = alive.peak + max(0, pages("Pss_Shmem") - before)
            alive.peak = alive.held
            return most

        yield on_cpu


def sent_bytes() -> dict[str, int]:
    """Bytes that each open TCP socket of this process has sent, by the kernel's name of it; Gloo moves tensors so."""
    sent = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        # The descriptor of the listing itself is gone by now, and some sockets are not TCP.
        with contextlib.suppress(OSError):
            name = os.readlink(descriptor)
            if name.startswith("socket:"):
                borrowed = socket.socket(fileno=int(descriptor.name))
                try:
                    info = borrowed.getsockopt(socket.IPPROTO_TCP, TCP_INFO, BYTES_SENT + 8)
                finally:
                    borrowed.detach()
                sent[name] = struct.unpack_from("Q", info, BYTES_SENT)[0]
    return sent


def sent_since(before: Mapping[str, int]) -> int:
    """Bytes sent since `sent_bytes` gave `before`, by the sockets that are open now: one that closed tells no more."""
    return sum(sent - before.get(name, 0) for name, sent in sent_bytes().items())
