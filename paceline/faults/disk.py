"""File systems that fill, turn read-only or lose what was not synced under a training, mounted for it alone.

This process and those that it starts see them in a mount namespace of their own, which the kernel removes with the last
of them: a kill that leaves no time to clean up leaves nothing to clean up.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.faults.outcome import wrong_with_checkpoints
from paceline.faults.training import FaultError, LackingError, Training
from paceline.train.run_folder import METRICS

SIZE = 64
"""MiB of a file system."""
UNSYNCED = 3
"""Steps that are written down after what was synced, so that there is something to lose."""
LETTING_GO_SECONDS = 60.0
_CLONE_NEWNS = 0x20000


def full(training: Training) -> str:
    """A tmpfs is filled in the midst of a training, which goes on to its end; then there is room again."""
    folder = _mounted(training, "-t", "tmpfs", "-o", f"size={SIZE}m", "paceline")
    training.run = folder / "run"
    process = training.start_and_wait()
    step = training.must_be_midway()
    with (folder / "filler").open("wb", buffering=0) as filler:
        refused = _refused(lambda: filler.write(bytes(2**12)), errno.ENOSPC)
    status = training.wait(process)
    _kept_going(training, step, "No space left on device")
    (folder / "filler").unlink()
    return f"{refused} after step {step}; all steps were done, the exit status was {status}"


def read_only(training: Training) -> str:
    """An ext4 turns read-only, as after an error of the disk; then it is repaired."""
    options = _new_ext4(training)
    process = training.start_and_wait()
    step = training.must_be_midway()
    # What was written down by now stays.
    _run("sync", "--file-system", str(training.run))
    refused = _aborted(training)
    status = training.wait(process)
    _kept_going(training, step, "Read-only file system")
    _repair(training, options)
    return f"{refused} after step {step}; all steps were done, the exit status was {status}"


def power_loss(training: Training) -> str:
    """Nothing reaches an ext4 any more, and all processes are killed: what was not synced is lost with the memory."""
    options = _new_ext4(training)
    process = training.start_and_wait(checkpoints=2)
    known = training.checkpoints()
    # What is written after the latest checkpoint is told to no disk.
    written = training.last_step() + UNSYNCED
    training.wait_for(process, lambda: training.last_step() >= written, f"step {written}")
    step = training.must_be_midway()
    size = (training.run / METRICS).stat().st_size
    refused = _aborted(training)
    training.kill()
    _repair(training, options)
    if not (left := training.checkpoints()) or left[0] < known[1]:
        raise FaultError(f"of the checkpoints {[each.name for each in known]} there are {[each.name for each in left]}")
    lost = size - ((training.run / METRICS).stat().st_size if (training.run / METRICS).exists() else 0)
    if lost <= 0:
        raise FaultError("nothing was lost that was not synced")
    training.go_on()
    return f"{refused} after step {step}; {lost} bytes of metrics were lost, and it went on from {left[0].name}"


def _new_ext4(training: Training) -> tuple[str, ...]:
    """Puts the run on a file system of its own; what to mount it with."""
    image = training.folder / "image"
    with image.open("wb") as file:
        file.truncate(SIZE * 2**20)
    _run("mkfs.ext4", "-q", str(image))
    options = ("-o", "loop,errors=remount-ro", str(image))
    training.run = _mounted(training, *options) / "run"
    return options


def _aborted(training: Training) -> str:
    """Ends the file system's journal; how it answers then."""
    folder = training.run.parent
    _run("mount", "-o", "remount,abort", str(folder))
    return _refused((folder / "probe").touch, errno.EROFS)


def _repair(training: Training, options: tuple[str, ...]) -> None:
    """Mounts the file system anew, as what is on the disk says."""
    training.closing.close()
    # 1: what was wrong is right again.
    _run("e2fsck", "-fy", options[-1], allowed=(0, 1))
    _mounted(training, *options)


def _kept_going(training: Training, step: int, words: str) -> None:
    """Checks that the training went on to its end with a warning, and left a good checkpoint.

    Raises:
        FaultError: It did not.
    """
    training.must_say(words)
    training.must_say(f"step {training.steps}/{training.steps}")
    if training.last_step() >= training.steps:
        raise FaultError(f"every step was written down, though nothing could be from step {step} on")
    if wrong := wrong_with_checkpoints(training.run):
        raise FaultError("; ".join(wrong))


def _mounted(training: Training, *arguments: str) -> Path:
    """Mounts a file system until the training is closed."""
    folder = training.folder / "disk"
    folder.mkdir(exist_ok=True)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise LackingError(f"the right to make namespaces: {os.strerror(ctypes.get_errno())}")
    try:
        _run("mount", "--make-rprivate", "/")
        _run("mount", *arguments, str(folder))
    except FaultError as error:
        raise LackingError(f"the right to mount, and the file system: {error}") from None
    training.closing.callback(_unmount, folder)
    return folder


def _unmount(folder: Path) -> None:
    """Unmounts a file system once the last thread that was killed has let go of it: till then it goes on as it is."""
    deadline = time.monotonic() + LETTING_GO_SECONDS
    while subprocess.run(["umount", str(folder)], capture_output=True).returncode:
        if time.monotonic() > deadline:
            # Lazily, so that a process that is still there does not keep it.
            _run("umount", "-l", str(folder))
            return
        time.sleep(0.05)


def _refused(write: Callable[[], object], number: int) -> str:
    """Writes until it is refused; how it was.

    Raises:
        FaultError: It is refused for another reason, or not at all.
    """
    try:
        for _ in range(SIZE * 2**20 // 2**12 + 1):
            write()
    except OSError as error:
        if error.errno == number:
            return f"the disk answered {errno.errorcode[number]}"
        raise FaultError(f"the disk answered {error.strerror}") from None
    raise FaultError("the disk takes what is written")


def _run(*command: str, allowed: Sequence[int] = (0,)) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in allowed:
        raise FaultError(f"{' '.join(command)}: {done.stderr.strip()}")
