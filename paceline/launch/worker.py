"""What a process that the launcher started does besides its work: die with it, and say why it failed."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.core.errors import UserError
from paceline.launch.failure import Failure, write_failure
from paceline.launch.screen import OutputClosed
from paceline.launch.seat import SEAT

FAILURE_FILE = "PACELINE_FAILURE_FILE"
"""Names the file that a worker leaves a report of its failure in."""
LAUNCHER = "PACELINE_LAUNCHER"
"""The launcher's process number."""
FORKS = "PACELINE_FORKS"
"""In the process that workers are forked from: the descriptor by which the launcher asks, and what to import first."""
PROCESSES = Path("/proc")
"""Where the kernel tells of each process."""
_PR_SET_PDEATHSIG = 1
_PEER_LOST = re.compile(
    r"is gone|rank \d+ gave up: |did not answer|connection (was )?(closed|reset|refused|aborted)|broken pipe"
    r"|socket closed|closed by peer|timed out|timeout waiting|remote process exited",
    re.IGNORECASE,
)


def run_worker(work: Callable[[], int]) -> int:
    """Runs `work`; in a process that the launcher started, a failure is left for it to report.

    Returns:
        The exit status that `work` returned; a process that the launcher started ends here instead.
    """
    # Taken out of the environment: what this process starts in turn is no worker.
    report, launcher = os.environ.pop(FAILURE_FILE, None), os.environ.pop(LAUNCHER, None)
    if report is None or launcher is None:
        return work()
    die_with(int(launcher))
    _take_name(os.environ)
    faulthandler.enable()
    try:
        status = work()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except OutputClosed:
        status = 128 + signal.SIGPIPE
    except Exception as error:
        # Told by the launcher, below the other workers' output.
        failure = describe_failure(error, int(os.environ.get("RANK", "0")))
        write_failure(Path(report), failure)
        status = failure.exit_status
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not by way of the interpreter's end: that would wait for ranks that are gone, and torch's own threads can
    # abort a process there whose work is done.
    os._exit(status)


def describe_failure(error: Exception, rank: int) -> Failure:
    """The exception as the launcher reports it."""
    user_error = isinstance(error, UserError)
    return Failure(
        rank=rank,
        time=time.monotonic(),
        exit_status=2 if user_error else 1,
        text=str(error) if user_error else "".join(traceback.format_exception(error)),
        user_error=user_error,
        peer_lost=not user_error and lost_a_peer(error),
    )


def lost_a_peer(error: BaseException | None) -> bool:
    """Whether an exception, or what caused it, says that another rank is gone."""
    while error is not None:
        if isinstance(error, (RuntimeError, OSError)) and _PEER_LOST.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def told(number: int) -> dict[str, str]:
    """The environment that a process was started with. A worker's has RANK, or SEAT where its rank may change.

    Args:
        number: Of the process.

    Raises:
        OSError: There is none, or it is another user's.
    """
    process = PROCESSES / str(number)
    items = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    environment = dict(item.split("=", 1) for item in items if "=" in item)
    # Of a worker that was forked, it is that of what it was forked from.
    kind, _, rank = (process / "comm").read_text().strip().partition(" ")
    return environment | ({SEAT: ""} if kind == "seat" else {"RANK": rank} if kind == "rank" else {})


def _take_name(environment: Mapping[str, str]) -> None:
    # As `top` shows it, and `told` reads it.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("seat" if SEAT in environment else f"rank {environment.get('RANK', 0)}")


def die_with(parent: int) -> None:
    """Lets the kernel kill this process when its parent is gone, however that ended.

    Args:
        parent: Its number.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have gone before the request was made.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
