"""The processes of other ranks on this host, and a signal that makes one print its stacks whatever it does."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

SIGNAL = getattr(signal, "SIGRTMAX", 64) - 3
"""Nobody else's: the system gives real-time signals no meaning."""
_STDERR = 2


def answer_signals() -> None:
    """From now on this process prints its stacks at the signal, even where native code keeps the interpreter."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, AttributeError):
        faulthandler.register(SIGNAL, file=_STDERR, all_threads=True)


def process() -> tuple[str, int]:
    """Names this process to others: a text that is the same where they can see it by its number, and the number."""
    boot, numbers = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    try:
        return f"{boot.read_text().strip()} {numbers.readlink()}", os.getpid()
    except OSError:
        return "", os.getpid()


class Mates:
    """Other ranks' processes on this host."""

    def __init__(self, rank: int, processes: Sequence[tuple[str, int]]) -> None:
        """Takes hold of them, so that a number that is used again is not taken for theirs.

        Args:
            rank: This rank.
            processes: What `process` said on every rank.
        """
        self._held: dict[int, tuple[int, int]] = {}
        self._here = [other for other, (host, _) in enumerate(processes) if host and host == processes[rank][0]]
        self._rank = rank
        for other in self._here:
            if other != rank:
                with contextlib.suppress(OSError, AttributeError):
                    self._held[other] = processes[other][1], os.pidfd_open(processes[other][1])

    def shake(self, silent: Sequence[int]) -> None:
        """Has those of this host that are silent print their stacks; one rank of the host does it for all."""
        awake = [other for other in self._here if other not in silent]
        if awake and awake[0] == self._rank:
            for other in silent:
                if other in self._held:
                    _ask_for_stacks(*self._held[other])

    def stopped(self) -> list[str]:
        """Which of them were stopped, as by SIGSTOP, and what lets each go on."""
        return [
            f"rank {other}'s process {number} is stopped: `kill -CONT {number}` lets it go on"
            for other, (number, _) in self._held.items()
            if _is_stopped(number)
        ]

    def close(self) -> None:
        """Lets go of them."""
        for _, descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


def _is_stopped(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _ask_for_stacks(number: int, descriptor: int) -> None:
    try:
        status = Path(f"/proc/{number}/status").read_text()
    except OSError:
        return
    # One that has let go of its answer would be ended by the signal.
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    if caught is not None and int(caught[1], 16) >> (SIGNAL - 1) & 1:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(descriptor, SIGNAL)
