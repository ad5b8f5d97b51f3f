"""Runs Python on a terminal, and gives what the terminal was sent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path


def on_terminal(
    arguments: Sequence[str],
    folder: Path | None = None,
    columns: int = 100,
    term: str = "xterm",
    timeout: float = 60,
    stop_at: str = "",
) -> tuple[int, str]:
    """Exit status of `python ARGUMENTS`, and all that it wrote to the terminal that it ran on.

    When a line that `stop_at` matches was written, it is sent what Ctrl-C sends.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": term, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, *arguments]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, start_new_session=True
    )
    os.close(theirs)
    data, deadline = b"", time.monotonic() + timeout
    try:
        # A terminal that nobody has open any more ends reading with an error.
        with contextlib.suppress(OSError):
            while select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
                data += os.read(ours, 1 << 16)
                if stop_at and re.search(stop_at, data.decode(errors="replace")):
                    process.send_signal(signal.SIGINT)
                    stop_at = ""
        return process.wait(max(1.0, deadline - time.monotonic())), data.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
