"""The cache folder: finished entries, a record of what was seen, and one preparer at a time.

    corpora/<key>/           a finished entry
    corpora/<key>.partial/   one being written, by the holder of the key's lock
    seen/<mark>              a lock, and once prepared a `Record`
    seen/<key>               a lock

A mark stands for files as the file system describes them, a key for their content; both with settings.
Locks are `flock` locks: they end with the process that holds them, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import UserError
from paceline.data.progress_bar import Report, size_text

QUIET_SECONDS = 2.0
POLL_SECONDS = 0.05
PARTIAL = ".partial"
KEY = re.compile(r"[0-9a-f]{32}")


class Record(NamedTuple):
    """What was seen behind a mark.

    Attributes:
        key: of the entry.
        unreadable: why files were passed over, by path.
    """

    key: str
    unreadable: dict[str, str]


class Cache:
    """Where prepared corpora live."""

    def __init__(self, folder: Path) -> None:
        """Nothing is created until something is written."""
        self.folder = folder
        self._corpora = folder / "corpora"
        self._seen = folder / "seen"

    def entry(self, key: str) -> Path:
        """Folder of the entry with `key`, which need not exist."""
        return self._corpora / key

    def recorded(self, mark: str) -> Record | None:
        """What is recorded for `mark`, or None."""
        try:
            record = Record(**json.loads((self._seen / mark).read_bytes()))
            return record if KEY.fullmatch(record.key) and isinstance(record.unreadable, dict) else None
        except (OSError, TypeError, ValueError):
            return None

    def record(self, mark: str, record: Record) -> None:
        """Remember what `mark` leads to; only for the holder of the mark's lock."""
        (self._seen / mark).write_text(json.dumps(record._asdict()), encoding="ascii")

    @contextmanager
    def lock(self, name: str, report: Report | None) -> Iterator[None]:
        """Hold the lock of a mark or key; a wait of more than two seconds is reported."""
        self._seen.mkdir(parents=True, exist_ok=True)
        with (self._seen / name).open("ab") as file:
            began = time.monotonic()
            told = False
            while not _try_lock(file.fileno()):
                if report is not None and not told and time.monotonic() - began > QUIET_SECONDS:
                    report(f"waiting for another process that prepares the same text ({self._seen / name})")
                    told = True
                time.sleep(POLL_SECONDS)
            yield

    @contextmanager
    def writing(self, key: str) -> Iterator[Path]:
        """A new folder that becomes the entry of `key` if the block succeeds, in place of a damaged one.

        For the holder of the key's lock. If the block raises, nothing is left.
        """
        self._corpora.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        folder = self._corpora / (key + PARTIAL)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
            for path in folder.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            # A process that still has files of a damaged entry mapped keeps them.
            shutil.rmtree(self.entry(key), ignore_errors=True)
            folder.rename(self.entry(key))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _remove_abandoned(self) -> None:
        """Remove what crashed processes left: folders whose lock nobody holds."""
        for folder in self._corpora.glob(f"*{PARTIAL}"):
            lock = self._seen / folder.name.removesuffix(PARTIAL)
            try:
                with lock.open("rb") as file:
                    if _try_lock(file.fileno()):
                        shutil.rmtree(folder, ignore_errors=True)
            except FileNotFoundError:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def explain_failed_writes(folder: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Turn a full or unwritable disk into a UserError that names the folder and the bytes needed."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(_existing(folder)).free
            raise UserError(
                f"the disk is full: preparing the text needs about {size_text(needed())} in {folder}, "
                f"{size_text(free)} are free there. Free some space, or choose another folder with "
                "data.cache or PACELINE_CACHE"
            ) from error
        impossible = (errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP)
        # Of other files these say that the text is gone, not that the cache cannot be made.
        own = isinstance(error.filename, (str, Path)) and _on_the_way(Path(error.filename), folder)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST) or (
            own and error.errno in impossible
        ):
            raise UserError(
                f"cannot write to the cache folder {folder}: {error}. Choose another with data.cache or PACELINE_CACHE"
            ) from error
        raise


def _on_the_way(path: Path, folder: Path) -> bool:
    return path == folder or path in folder.parents or folder in path.parents


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
