"""Starts paceline as users do, in processes that a test can find again and that never outlive it.

Or trains in ranks that are there, where starting is not what is tested.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from paceline.cli import main
from paceline.comm.environment import OF_A_RANK
from paceline.launch.worker import told
from tests.ranks import RankPool

_PR_SET_PDEATHSIG = 1
MARK = "PACELINE_TEST_MARK"
PATIENCE = 150.0
"""Seconds after which a program that has not ended is a failure: many times what it needs on a busy machine."""


def new_in_shared_memory(before: set[str]) -> set[str]:
    """Names in /dev/shm that were not there, and that no process uses: other programs of this machine have theirs.

    Nor those of Python's semaphores, which lose their names as they are made: any that is there is being made.
    """
    deadline = time.monotonic() + 20
    while (found := _named_in_shared_memory() - before - _used_shared_memory()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _named_in_shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def _used_shared_memory() -> set[str]:
    """Names of what a process has mapped or open, such as the lock of its folder."""
    used = list[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            used += (process / "maps").read_text().splitlines()
        for descriptor in process.glob("fd/*"):
            with contextlib.suppress(OSError):
                used.append(os.readlink(descriptor))
    return {line.rpartition("/dev/shm/")[2].partition("/")[0] for line in used if "/dev/shm/" in line}


def _end_with_parent() -> None:
    """As a test's own process may be killed, which then cleans up nothing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Program:
    """A process and everything that it starts, known by a variable in their environment."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        inherited = {key: value for key, value in os.environ.items() if key not in OF_A_RANK}
        self.process = subprocess.Popen(
            list(command),
            cwd=folder,
            env={**inherited, **(environment or {}), MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def finish(self, timeout: float = PATIENCE) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def alive(self) -> dict[int, dict[str, str]]:
        """Environment of each process that carries the mark, by its number."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    environment = told(int(entry.name))
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if environment.get(MARK) == self.mark and state != "Z":
                        found[int(entry.name)] = environment
        return found

    def rank(self, number: int) -> int:
        """Process number of a rank."""
        return next(pid for pid, env in self.alive().items() if env.get("RANK") == str(number))

    def wait_until_gone(self, timeout: float) -> None:
        """Fails if a process that carries the mark is still there after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while left := self.alive():
            assert time.monotonic() < deadline, f"still running: {sorted(left)}"
            time.sleep(0.02)


@contextlib.contextmanager
def program(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Program]:
    """A program that is gone with all its children when the block ends."""
    started = Program(command, folder, environment)
    try:
        yield started
    finally:
        for pid in started.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.process.kill()
        started.process.communicate()


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """The command that starts so many ranks of `arguments` on this host."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*agent, *arguments]


def paceline(*arguments: str) -> list[str]:
    """The command line of `paceline ...`."""
    return [sys.executable, "-m", "paceline", *arguments]


def finished(
    command: list[str], folder: Path, environment: Mapping[str, str] | None = None, timeout: float = PATIENCE
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a program that ends by itself."""
    with program(command, folder, environment) as started:
        return started.finish(timeout)


def called(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """What `finished` gives of `paceline ...`, called in this process, which has imported torch."""
    out, err, path = io.StringIO(), io.StringIO(), sys.path[:]
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
    finally:
        sys.path[:] = path
    return status, out.getvalue(), err.getvalue()


def trained(
    ranks: RankPool,
    n: int,
    folder: Path,
    flags: Sequence[str],
    patched: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> tuple[int, str, str]:
    """What `finished` gives of rank 0 of `paceline train`, run by `n` ranks of a pool inside `patched`."""
    return ranks(n, _train, folder, flags, patched)[0]


def _train(
    folder: Path, flags: Sequence[str], patched: Callable[[], contextlib.AbstractContextManager[object]]
) -> tuple[int, str, str]:
    # What a model writes in the end takes as long as it trained.
    with patched(), patch("paceline.train.summary.SAMPLE_TOKENS", 12):
        return called(folder, "train", *flags)


def metrics(run: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    # The last line may be under way.
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def wait_for_step(started: Program, run: Path, step: int, timeout: float = PATIENCE) -> None:
    """Returns when the run has logged `step`."""
    deadline = time.monotonic() + timeout
    while not any(line["step"] >= step for line in metrics(run)):
        assert started.process.poll() is None, started.process.communicate()
        assert time.monotonic() < deadline, f"no step {step} after {timeout} s"
        time.sleep(0.02)
