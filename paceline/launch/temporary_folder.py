"""Folders in the temporary folder that are gone with their process, or when the next one of their user starts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "paceline-"
_LOCK = "lock"


class TemporaryFolder:
    """A new folder that only this user may enter.

    Its lock is held for life, by the kernel: a folder whose lock is free belongs to a process that was killed, and is
    removed by the next one that makes a folder.

    Attributes:
        path: Where it is.
    """

    def __init__(self, kind: str, parent: Path | None = None, path: Path | None = None) -> None:
        """Makes it.

        Args:
            kind: Part of its name, such as "job".
            parent: Where; by default in the temporary folder.
            path: What it is to be: the one that another host's launcher has made there.

        Raises:
            OSError: It cannot be made, or `path` is there already.
        """
        parent = (parent or Path(tempfile.gettempdir())) if path is None else path.parent
        for abandoned in _abandoned(parent):
            shutil.rmtree(abandoned, ignore_errors=True)
        if path is None:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=parent))
        else:
            self.path = path
            path.mkdir(mode=0o700)
        # The lock has its name only once it is held.
        self._lock = (self.path / "unlocked").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "unlocked").rename(self.path / _LOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes it with all that is in it; safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _abandoned(parent: Path) -> Iterator[Path]:
    """Folders of this user whose lock nobody holds, while it is held here.

    Others may put what they like beside them, such as a pipe that would be waited at or a link to another folder: what
    is not this user's, or no plain file in a plain folder, is passed over.
    """
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if not _is_ours(os.lstat(folder), stat.S_IFDIR):
                continue
            lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                if _is_ours(os.fstat(lock), stat.S_IFREG):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield folder
            finally:
                os.close(lock)


def _is_ours(found: os.stat_result, kind: int) -> bool:
    return found.st_uid == os.getuid() and stat.S_IFMT(found.st_mode) == kind
