"""Why a worker ended: written down by the worker, read by the launcher, told in words."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

SIGNALS_IN_WORDS = {
    signal.SIGKILL: "it was killed from outside",
    signal.SIGSEGV: "it read or wrote memory that is not its own",
    signal.SIGABRT: "a library gave up",
    signal.SIGBUS: "memory behind a mapped file was gone; a file or disk may be full",
    signal.SIGILL: "it met an instruction that this processor does not have",
    signal.SIGFPE: "an arithmetic fault",
    signal.SIGTERM: "it was asked to end from outside",
}


@dataclass(frozen=True)
class Failure:
    """The end of one worker that did not end well."""

    rank: int
    time: float
    """Seconds on the host's monotonic clock."""
    exit_status: int
    """For the shell: the worker's, or 128 + the signal that ended it."""
    text: str
    """The traceback, or for a user's mistake the message."""
    user_error: bool = False
    """The message speaks to the user and needs no traceback."""
    peer_lost: bool = False
    """It failed because another rank was gone, so the cause is elsewhere."""

    def describe(self, workers: int, memory_kills: int) -> str:
        """The report for the screen.

        Args:
            workers: Number of workers in the job.
            memory_kills: How often the kernel ended a process for want of memory while the job ran.
        """
        if self.user_error:
            return f"paceline: error: {self.text}"
        lines = [f"rank {self.rank} of {workers} failed; the other workers were ended.", self.text.rstrip()]
        if self.exit_status == 128 + signal.SIGKILL:
            lines.append(
                "The kernel's out-of-memory killer struck while the job ran: use fewer workers, a smaller "
                "micro_batch or a smaller model."
                if memory_kills > 0
                else "If nobody did so on purpose, look in the system log (dmesg) for a lack of memory."
            )
        return "\n".join(lines)


def write_failure(path: Path, failure: Failure) -> None:
    """Writes the report in one piece; a full disk loses it, and the exit status must do."""
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return


def read_failure(path: Path, rank: int, returncode: int, noticed: float) -> Failure:
    """What the worker wrote, or what its exit status tells.

    Args:
        path: Where the worker would have written.
        rank: Its rank.
        returncode: As `subprocess.Popen.returncode`: negative for a signal.
        noticed: When its end was seen, on the host's monotonic clock.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Failure)
    except (OSError, ValueError):
        pass
    if returncode >= 0:
        return Failure(rank, noticed, returncode, f"It exited with status {returncode} without an exception.")
    number = -returncode
    try:
        name, words = signal.Signals(number).name, SIGNALS_IN_WORDS.get(signal.Signals(number))
    except ValueError:
        name, words = "unknown", None
    text = f"Signal {number} ({name}) ended it" + (f": {words}." if words else ".")
    return Failure(rank, noticed, 128 + number, text)


def first_failure(failures: Iterable[Failure]) -> Failure:
    """The one that began it: the earliest that did not fail for want of a peer; else the earliest."""
    return min(failures, key=lambda failure: (failure.peer_lost, failure.time))


def memory_kills() -> int:
    """How many processes this host's kernel has ended for want of memory since it started; 0 where unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
