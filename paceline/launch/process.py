"""A worker as its launcher sees it: a process on this host, or one that another host's launcher looks after."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol


@dataclass(frozen=True)
class Command:
    """What workers are started with.

    Attributes:
        words: Program and arguments.
        imports: Modules that every worker needs. With any, the program calls `become_worker` first.
    """

    words: list[str]
    imports: tuple[str, ...] = ()


class Process(Protocol):
    """What a launcher asks of a worker.

    Attributes:
        returncode: As `subprocess.Popen.returncode`; None while it runs.
        stderr: What it writes there, where this launcher shows it.
    """

    returncode: Any
    stderr: IO[bytes] | None

    def poll(self) -> int | None:
        """Its `returncode`, looked up anew; None while it runs."""

    def wait(self) -> int:
        """Its `returncode`, once it has ended."""

    def send_signal(self, sig: int, /) -> None:
        """Signals it, if it runs."""

    def end_group(self) -> None:
        """Ends what it started in turn, which must not outlive it."""

    def is_stopped(self) -> bool:
        """Whether it was stopped, as by SIGSTOP."""


class OnThisHost:
    """What is asked of a process on this host, in a group of its own, by its number."""

    pid: int

    def end_group(self) -> None:
        """See `Process`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end_descriptor(self) -> int | None:
        """A descriptor that can be read from when the process has ended; None where the kernel has none."""
        try:
            return os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return None

    def is_stopped(self) -> bool:
        """See `Process`."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False


class LocalProcess(OnThisHost, subprocess.Popen[bytes]):
    """One that was started as a program."""
