"""What a benchmark reads from the operating system: memory of this process, bytes that its sockets sent."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from pathlib import Path

import torch

TCP_INFO = 11
BYTES_SENT = 200
"""Where Linux's struct tcp_info (include/uapi/linux/tcp.h) keeps tcpi_bytes_sent, a u64."""


def resident_bytes(device: torch.device) -> int:
    """Memory this process holds: resident on a CPU, allocated by torch on a GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """The most that `resident_bytes` has been since the process began.

    Not getrusage's ru_maxrss: that starts at the size of the process that started this one.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def sent_bytes() -> int:
    """Bytes that the open TCP sockets of this process have sent, through which Gloo moves tensors."""
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        # The descriptor of the listing itself is gone by now, and some sockets are not TCP.
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith("socket:"):
                borrowed = socket.socket(fileno=int(descriptor.name))
                try:
                    info = borrowed.getsockopt(socket.IPPROTO_TCP, TCP_INFO, BYTES_SENT + 8)
                finally:
                    borrowed.detach()
                total += struct.unpack_from("Q", info, BYTES_SENT)[0]
    return total


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found, name
    return int(found[1]) * 1024
