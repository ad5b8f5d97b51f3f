"""Which files hold the text: paths, folders and globs become one ordered list of files with their sizes."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import platform
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.errors import UserError

PLAIN = (".txt", ".py", ".md")
LINES = (".jsonl",)
NOT_SOURCE = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class TextFile(NamedTuple):
    """One file of text as the file system describes it.

    Attributes:
        path: absolute path.
        size: bytes on disk (compressed bytes for .gz).
        mtime_ns: time of last change in nanoseconds.
    """

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Sources:
    """The files to read, in order, and what was passed over.

    Attributes:
        name: what the user would call this text.
        files: non-empty files with a known suffix; each path once.
        ignored: how many entries were passed over, by suffix or by reason in parentheses.
        unreadable: why files and folders that this process may not read were passed over, by path.
    """

    name: str
    files: list[TextFile]
    ignored: dict[str, int]
    unreadable: dict[str, str]

    def fingerprint(self) -> str:
        """Hexadecimal digest of all paths, sizes and times of change; reads no file."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            digest.update(os.fsencode(file.path) + b"\0%d %d\n" % (file.size, file.mtime_ns))
        return digest.hexdigest()

    def read_size(self) -> int | None:
        """Bytes of text that reading will yield, or None where .gz or .jsonl hide the number."""
        if any(not file.path.lower().endswith(PLAIN) for file in self.files):
            return None
        return sum(file.size for file in self.files)


def suffix(path: str) -> str:
    """The lower-case suffix that tells how to read a file, without a trailing `.gz`: `a.TXT.gz` -> `.txt`."""
    name = os.path.basename(path).lower()
    return os.path.splitext(name.removesuffix(".gz"))[1]


def find(paths: tuple[str, ...]) -> Sources:
    """Resolve files, folders and globs to the files they hold.

    Folders are searched to any depth and their files sorted by path, so that the order does not depend
    on the file system. Hidden entries and links to folders are passed over, and what this process may not read.
    A file reached twice counts once.

    Args:
        paths: files, folders or globs; empty means the standard library's source.

    Raises:
        UserError: nothing exists at a path, a file named explicitly has an unknown suffix, or no text was found
            at all.
    """
    passed_over = _PassedOver()
    if paths:
        name, files = ", ".join(paths), [file for path in paths for file in _resolve(path, passed_over)]
    else:
        # The running interpreter's own .py files, without tests and installed packages.
        name = f"Python {platform.python_version()} standard library"
        files = sorted(_walk(sysconfig.get_path("stdlib"), (".py",), NOT_SOURCE, passed_over))
    found = [file for file in {file.path: file for file in files}.values() if passed_over.readable(file)]
    ignored = dict(sorted(passed_over.ignored.items()))
    if not found:
        seen = ", ".join(f"{count} {what}" for what, count in ignored.items()) or "nothing"
        raise UserError(
            f"no text found in {name}: expected files ending in {_accepted()} that are not empty and can be read, "
            f"found {seen}. Point data.path at text" + "".join(f"\n{why}" for why in passed_over.unreadable.values())
        )
    return Sources(name, found, ignored, passed_over.unreadable)


class _PassedOver:
    """What is not read, and why; see `Sources`."""

    def __init__(self) -> None:
        self.ignored: Counter[str] = Counter()
        self.unreadable: dict[str, str] = {}

    def forbid(self, path: str, reason: str | None) -> None:
        self.unreadable[path] = f"cannot read {path}: {reason}. Check its permissions"

    def readable(self, file: TextFile) -> bool:
        """Whether this process may read a file, which is asked before: a file that it may read later is a new one."""
        may = os.access(file.path, os.R_OK, effective_ids=os.access in os.supports_effective_ids)
        if not may:
            self.forbid(file.path, os.strerror(errno.EACCES))
        return may


def _resolve(path: str, passed_over: _PassedOver) -> list[TextFile]:
    """The files behind one entry of data.path."""
    given = os.path.abspath(os.path.expanduser(path))
    status = _status(given)
    if status is None:
        matches = sorted(glob.glob(given, recursive=True)) if glob.has_magic(given) else []
        if not matches:
            raise UserError(f"data.path: nothing exists at {path} (looked for {given}). Check the spelling")
        explicit = False
    else:
        matches, explicit = [given], True
    files: list[TextFile] = []
    for match in matches:
        status = _status(match)
        if status is None:
            passed_over.ignored["(broken link)"] += 1
        elif stat.S_ISDIR(status.st_mode):
            if "**" not in given:  # `**` matches what is below a folder by itself
                files += sorted(_walk(match, PLAIN + LINES, frozenset(), passed_over))
        elif suffix(match) not in PLAIN + LINES:
            if explicit:
                raise UserError(
                    f"data.path: {path} has a suffix that is not known to hold text. Expected {_accepted()}; "
                    "rename it or convert it"
                )
            passed_over.ignored[suffix(match) or "(no suffix)"] += 1
        elif status.st_size == 0:
            passed_over.ignored["(empty)"] += 1
        else:
            files.append(TextFile(match, status.st_size, status.st_mtime_ns))
    return files


def _walk(root: str, suffixes: tuple[str, ...], skip: frozenset[str], passed_over: _PassedOver) -> Iterator[TextFile]:
    """Every file below `root` with one of `suffixes`, in no particular order; the rest is counted."""
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        passed_over.ignored["(hidden)"] += 1
                    elif entry.is_dir(follow_symlinks=False):
                        if entry.name not in skip:
                            pending.append(entry.path)
                    elif isinstance(found := _file_or_reason(entry, suffixes), str):
                        passed_over.ignored[found] += 1
                    else:
                        yield found
        except OSError as error:
            passed_over.forbid(folder, error.strerror)


def _file_or_reason(entry: os.DirEntry[str], suffixes: tuple[str, ...]) -> TextFile | str:
    """The file, or why it is passed over."""
    if suffix(entry.name) not in suffixes:
        return suffix(entry.name) or "(no suffix)"
    try:
        status = entry.stat()
    except OSError:
        return "(broken link)" if entry.is_symlink() else "(gone)"
    if stat.S_ISDIR(status.st_mode):
        return "(link to a folder)"
    if not stat.S_ISREG(status.st_mode):
        return "(not a file)"
    return TextFile(entry.path, status.st_size, status.st_mtime_ns) if status.st_size else "(empty)"


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}. Check its permissions") from error


def _accepted() -> str:
    return ", ".join(PLAIN + LINES) + " (also with .gz)"
