"""Ranks that get too little memory or processor time, in cgroups of their own (version 1)."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from paceline.faults.outcome import lines
from paceline.faults.training import FaultError, LackingError, Training

MEMORY, PROCESSOR = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/cpu")
PREFIX = "paceline-faults-"
QUOTA = 10
"""Per cent of a core."""
MARGIN = 64 << 20
"""Bytes that the job may take on top of what it has."""

GREEDY = """
import sys
from pathlib import Path

events, held = Path(sys.argv[1]), []
while "oom_kill 0" in events.read_text():
    held.append(b"x" * (1 << 20))
"""
"""A program that takes memory until the kernel has killed another."""


def out_of_memory(training: Training) -> str:
    """A neighbour in the job's cgroup takes what memory there is, and the kernel kills the largest process, a rank."""
    group = _group(training, MEMORY)
    process = training.start()
    (group / "cgroup.procs").write_text(str(process.pid))
    training.wait_for_checkpoints(process, 1)
    limit = int((group / "memory.usage_in_bytes").read_text()) + MARGIN
    (group / "memory.limit_in_bytes").write_text(str(limit))
    events = group / "memory.oom_control"
    join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    with subprocess.Popen(["sh", "-c", join, "sh", sys.executable, "-c", GREEDY, str(events)]) as neighbour:
        try:
            status = training.wait(process)
        finally:
            neighbour.kill()
    step = training.must_be_midway()
    # The neighbour may be the next, as it goes on until it sees this.
    if not int(events.read_text().split("oom_kill ")[1]):
        raise FaultError(f"the kernel killed nothing: {training.tail()}")
    if status != 128 + signal.SIGKILL:
        raise FaultError(f"exit status {status}, not the killed rank's: {training.tail()}")
    training.must_say("of 2 failed")
    training.must_say("out-of-memory killer struck")
    (group / "memory.limit_in_bytes").write_text("-1")
    return f"the cgroup counts kills for want of memory, and a rank was ended by one after step {step}"


def slow(training: Training) -> str:
    """Rank 1 gets a tenth of a core."""
    group = _group(training, PROCESSOR)
    (group / "cpu.cfs_period_us").write_text("100000")
    (group / "cpu.cfs_quota_us").write_text(str(100000 * QUOTA // 100))
    process = training.start_and_wait()
    step = training.must_be_midway()
    (group / "cgroup.procs").write_text(str(training.ranks()[1]))
    if status := training.wait(process):
        raise FaultError(f"a slow rank ended the job with status {status}: {training.tail()}")
    training.must_say("slow: rank 1 costs the others")
    throttled = int((group / "cpu.stat").read_text().split("nr_throttled ")[1].split()[0])
    seconds = {line["step"]: line["perf/step_seconds"] for line in lines(training.run) if "train/loss" in line}
    before, after = (
        statistics.median(value for at, value in seconds.items() if chosen(at))
        for chosen in (lambda at: 1 < at < step, lambda at: at > step)
    )
    if not throttled or after < before:
        raise FaultError(f"the kernel held it up {throttled} times, and a step took {after:.3f} s for {before:.3f}")
    return f"the kernel held the rank up {throttled} times; a step took {after:.3f} s instead of {before:.3f}"


def missing(controller: Path) -> str:
    """What the machine lacks, in words."""
    if os.geteuid():
        return "root"
    name = controller.name
    return "" if (controller / "cgroup.procs").exists() else f"the {name} controller of cgroup version 1"


def _group(training: Training, controller: Path) -> Path:
    """A new cgroup, until the training is closed; those that a killed process has left are removed."""
    for left in controller.glob(f"{PREFIX}*"):
        if not Path("/proc", left.name.removeprefix(PREFIX)).exists():
            left.rmdir()
    group = controller / f"{PREFIX}{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise LackingError(f"a cgroup folder that can be written to: {error}") from None
    training.closing.callback(_remove, group)
    return group


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return group.rmdir()
        except OSError:
            # The kernel has not yet reaped the last process.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
