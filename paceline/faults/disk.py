"""File systems that fill or turn read-only, mounted for one fault."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from paceline.faults.training import FaultError, Training


@contextlib.contextmanager
def _mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise FaultError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily, so that a process that is still there does not keep it.
        subprocess.run(["umount", "-l", str(folder)], check=True)


def full(training: Training) -> None:
    """A tmpfs is filled while training; then the room comes back."""
    with _mounted(training.folder / "small", "-t", "tmpfs", "-o", "size=64m", "paceline") as folder:
        training.run = folder / "run"
        process = training.start()
        training.wait_for_step(process, 6)
        with contextlib.suppress(OSError), (folder / "filler").open("wb") as filler:
            while True:
                filler.write(bytes(2**16))
                filler.flush()
        training.wait(process)
        (folder / "filler").unlink()
        training.go_on()
        training.check()


def read_only(training: Training) -> None:
    """An ext4 turns read-only while training, as after an error of the disk, then is writable again."""
    image = training.folder / "image"
    with image.open("wb") as file:
        file.truncate(64 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with _mounted(training.folder / "disk", "-o", "loop", str(image)) as folder:
        training.run = folder / "run"
        process = training.start()
        training.wait_for_step(process, 6)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], capture_output=True)
        training.wait(process)
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        training.go_on()
        training.check()
