"""A save that is killed as it enters a call of the kernel that changes the disk: each of them in turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter

from paceline.faults.training import FaultError, LackingError, Training

CALLS = (
    *("openat", "mkdir", "mkdirat", "write", "writev", "pwrite64", "ftruncate", "fallocate", "fsync", "fdatasync"),
    *("close", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir"),
)
"""Those that change the disk, and closing a file, of which a save makes some."""
LEAST = 15
"""How often a save makes any of them at least."""


def kill_at_every_call(training: Training) -> str:
    """SIGKILL of one save after the other, each at another call."""
    command = [sys.executable, "-m", "paceline.faults.saver", str(training.folder / "checkpoints")]
    with (
        training.log() as log,
        subprocess.Popen(
            command, env=training.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as saver,
    ):
        loaded: Counter[int] = Counter()
        try:
            for call in CALLS:
                loaded += _killed_at_each(saver, call, training)
        finally:
            saver.kill()
    if (kills := loaded.total()) < LEAST:
        raise FaultError(f"only {kills} saves were killed")
    return f"{kills} saves were killed; the checkpoint before loaded after {loaded[1]}, and this one after {loaded[2]}"


def _killed_at_each(saver: subprocess.Popen[str], call: str, training: Training) -> Counter[int]:
    """Kills a save as it makes a call for the first time, another at the second, until one makes it no more.

    Returns:
        How many were killed, by the step of the checkpoint that loaded then.

    Raises:
        FaultError: A save ended otherwise, or what loads is not what was saved.
    """
    loaded: Counter[int] = Counter()
    while True:
        number = loaded.total() + 1
        found = _killed_at(saver, call, number, training)
        if not found["right"]:
            raise FaultError(f"killed at {call} {number}, and checkpoint {found['step']} holds not what was saved")
        if found["signal"] == 0 and found["step"] == 2:
            return loaded
        if found["signal"] != signal.SIGKILL:
            how = f"it ended by signal {found['signal']}, and {found['step']} loads"
            raise FaultError(f"{call} {number}: {how}: {training.tail()}")
        loaded[found["step"]] += 1


def _killed_at(saver: subprocess.Popen[str], call: str, number: int, training: Training) -> dict[str, int]:
    """What became of a save that was to be killed as it makes a call for the `number`-th time."""
    assert saver.stdin is not None and saver.stdout is not None
    saver.stdin.write("\n")
    saver.stdin.flush()
    process = _answer(saver, training)["process"]
    inject = ["-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={number}"]
    command = ["strace", "-o", os.devnull, *inject, "-p", str(process)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        if "attached" not in (line := tracer.stderr.readline()):
            os.kill(process, signal.SIGKILL)
            raise LackingError(f"the right to trace processes: {line.strip()}")
        os.kill(process, signal.SIGCONT)
        return _answer(saver, training)


def _answer(saver: subprocess.Popen[str], training: Training) -> dict[str, int]:
    assert saver.stdout is not None
    if not (line := saver.stdout.readline()):
        raise FaultError(f"the saving program ended: {training.tail()}")
    found: dict[str, int] = json.loads(line)
    return found
