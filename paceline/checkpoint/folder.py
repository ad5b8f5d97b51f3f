"""A checkpoint's folder: made new, complete when its manifest is there, found and removed. Imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from paceline.checkpoint.manifest import NAME, DamagedError, Manifest, from_bytes, to_bytes
from paceline.core.errors import UserError

CHECKPOINTS = "checkpoints"
"""Folder of checkpoints in a run's."""
REPLACED = "replaced"
"""Folder of checkpoints of steps that were taken again."""

_STEP = re.compile(r"step-(\d+)")
_OURS = re.compile(r"rank-\d{5,9}\.(safetensors|json|failed)(\.new)?|manifest\.json\.new|\.tmp\w{6}|begun-[0-9a-f]{16}")
"""What an unfinished checkpoint may hold; `.tmp` is what safetensors calls a file that it is still writing."""

_SEEN_SECONDS = 5.0
"""Within which hosts see on a disk that they share what one of them has made."""


def step_folder(parent: Path, step: int) -> Path:
    """Where the checkpoint of a step lies among others."""
    return parent / f"step-{step:08d}"


def make_folder(path: Path, token: str = "") -> None:
    """Makes the folder of a new checkpoint; one that was left unfinished there is removed.

    Args:
        path: The folder.
        token: Of this save, by which other ranks see in `require_shared` that their folder is this one.

    Raises:
        UserError: Something else is there, or it cannot be made.
    """
    try:
        if path.exists():
            if is_complete(path):
                raise UserError(f"{path} holds a checkpoint, and these are never overwritten: name a new folder")
            if not path.is_dir() or any(not _OURS.fullmatch(item.name) for item in path.iterdir()):
                raise UserError(f"{path} is there and holds something else: name a new folder")
            shutil.rmtree(path)
        path.mkdir(parents=True)
        if token:
            begun_file(path, token).touch()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be made: {reason}; name another folder") from error


def require_shared(path: Path, token: str) -> None:
    """Makes sure that what rank 0 has made is seen from here.

    Raises:
        UserError: It is not, as where each host has a disk of its own.
    """
    until = time.monotonic() + _SEEN_SECONDS
    while not begun_file(path, token).exists():
        if time.monotonic() > until:
            raise UserError(
                f"{path} is not the folder that rank 0 has made under this name: name one that all hosts share"
            )
        time.sleep(0.05)


def complete_steps(parent: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, in order."""
    return sorted(step for step, _ in _steps(parent))


def discard(path: Path) -> None:
    """Removes what a checkpoint that failed has written, so that it takes no room."""
    if not is_complete(path):
        shutil.rmtree(path, ignore_errors=True)


def is_complete(path: Path) -> bool:
    """Whether all of a checkpoint was written."""
    return (path / NAME).is_file()


def complete(path: Path, manifest: Manifest) -> Path:
    """Ends a checkpoint whose files are on the disk: from here on it counts. Returns the manifest's file.

    Raises:
        OSError: The manifest cannot be written.
    """
    temporary = path / f"{NAME}.new"
    temporary.write_bytes(to_bytes(manifest))
    sync(temporary)
    sync(path)
    os.replace(temporary, path / NAME)
    sync(path)
    sync(path.parent)
    return path / NAME


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        DamagedError: It cannot be read, is damaged, or its files are missing or too short.
    """
    try:
        manifest = from_bytes((path / NAME).read_bytes())
        for file in {part.file for stored in manifest.tensors.values() for part in stored.parts}:
            (path / file).stat()
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path / NAME}: {error}. Load another checkpoint, or another copy of this one") from error
    return manifest


def checkpoints_in(path: Path) -> list[Path]:
    """The complete checkpoints that a folder holds, the latest first; the folder itself, if it is one.

    Raises:
        UserError: There is none.
    """
    if is_complete(path):
        return [path]
    found = _steps(path)
    if not found:
        what = "is a file" if path.is_file() else "is not there"
        if path.is_dir():
            what = "holds no complete checkpoint named step-<number>"
        raise UserError(f"{path} {what}: name a checkpoint that pl.save wrote, or a folder of them")
    return [folder for _, folder in sorted(found, reverse=True)]


def folder_of(path: str) -> Path:
    """Where the checkpoints lie that a run's folder, a folder of them or one of them names."""
    given = Path(path).expanduser()
    return given / CHECKPOINTS if (given / CHECKPOINTS).is_dir() else given


def set_aside(parent: Path, step: int) -> list[Path]:
    """Moves checkpoints of later steps than `step` to a folder of their own, as training goes on from before them.

    Returns:
        Where they are now.
    """
    moved = []
    for later, path in sorted(_steps(parent)):
        if later > step:
            (parent / REPLACED).mkdir(exist_ok=True)
            target = parent / REPLACED / path.name
            shutil.rmtree(target, ignore_errors=True)
            moved.append(path.rename(target))
    return moved


def prune(parent: Path, keep: int, keep_every: int = 0) -> list[Path]:
    """Removes old checkpoints, and unfinished ones that are older than the latest complete one.

    Args:
        parent: Folder of `step_folder`s.
        keep: How many of the latest stay, at least 1.
        keep_every: Those of steps that this divides stay too; 0: none.

    Returns:
        What was removed.
    """
    steps = sorted(_steps(parent), reverse=True)
    if not steps:
        return []
    gone = [path for step, path in steps[max(1, keep) :] if not keep_every or step % keep_every]
    unfinished = [path for step, path in _steps(parent, unfinished=True) if step < steps[0][0]]
    for path in (*gone, *unfinished):
        # First what makes it count, so that half a checkpoint is never taken for one.
        (path / NAME).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return [*gone, *unfinished]


def begun_file(path: Path, token: str) -> Path:
    """What `make_folder` leaves for other ranks to see."""
    return path / f"begun-{token}"


def _steps(parent: Path, unfinished: bool = False) -> list[tuple[int, Path]]:
    found = []
    for path in parent.glob("step-*"):
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink() and is_complete(path) != unfinished:
            found.append((int(match[1]), path))
    return found


def sync(path: Path) -> None:
    """Sees that a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
