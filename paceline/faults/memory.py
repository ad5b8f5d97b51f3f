"""The kernel's out-of-memory killer, in a cgroup of its own."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from paceline.faults.training import FaultError, Training

CONTROLLER = Path("/sys/fs/cgroup/memory")


def out_of_memory(training: Training) -> None:
    """One rank is put into a cgroup with less memory than it has, and killed by the kernel at its next allocation."""
    group = CONTROLLER / f"paceline-faults-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        process = training.start()
        training.wait_for(process, lambda: 1 in training.ranks(), "rank 1")
        # So early that it has most of its memory yet to ask for.
        (group / "memory.limit_in_bytes").write_text(str(48 * 2**20))
        (group / "cgroup.procs").write_text(str(training.ranks()[1]))
        status = training.wait(process)
        if status == 0 or "memory" not in training.said():
            raise FaultError(f"exit status {status}, and no word of memory: {training.said()[-400:]}")
    finally:
        training.end()
        os.rmdir(group)
