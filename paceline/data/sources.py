"""Which files hold the text: paths, folders and globs become one ordered list of files with their sizes."""

from __future__ import annotations

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

from paceline.errors import UserError

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
    """

    name: str
    files: list[TextFile]
    ignored: dict[str, int]

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
    on the file system. Hidden entries and links to folders are passed over. A file reached twice
    counts once.

    Args:
        paths: files, folders or globs; empty means the standard library's source.

    Raises:
        UserError: nothing exists at a path, a folder cannot be read, a file named explicitly has an
            unknown suffix, or no text was found at all.
    """
    if not paths:
        return _standard_library()
    found: dict[str, TextFile] = {}
    ignored: Counter[str] = Counter()
    for path in paths:
        for file in _resolve(path, ignored):
            found.setdefault(file.path, file)
    name = ", ".join(paths)
    return _checked(Sources(name, list(found.values()), dict(sorted(ignored.items()))))


def _standard_library() -> Sources:
    """The running interpreter's own .py files, without tests and installed packages."""
    root = sysconfig.get_path("stdlib")
    ignored: Counter[str] = Counter()
    files = sorted(_walk(root, (".py",), NOT_SOURCE, ignored))
    name = f"Python {platform.python_version()} standard library"
    return _checked(Sources(name, files, dict(sorted(ignored.items()))))


def _checked(sources: Sources) -> Sources:
    if not sources.files:
        seen = ", ".join(f"{count} {what}" for what, count in sources.ignored.items()) or "nothing"
        raise UserError(
            f"no text found in {sources.name}: expected files ending in {_accepted()} that are not empty, "
            f"found {seen}. Point data.path at text"
        )
    return sources


def _resolve(path: str, ignored: Counter[str]) -> list[TextFile]:
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
            ignored["(broken link)"] += 1
        elif stat.S_ISDIR(status.st_mode):
            if "**" not in given:  # `**` matches what is below a folder by itself
                files += sorted(_walk(match, PLAIN + LINES, frozenset(), ignored))
        elif suffix(match) not in PLAIN + LINES:
            if explicit:
                raise UserError(
                    f"data.path: {path} has a suffix that is not known to hold text. Expected {_accepted()}; "
                    "rename it or convert it"
                )
            ignored[suffix(match) or "(no suffix)"] += 1
        elif status.st_size == 0:
            ignored["(empty)"] += 1
        else:
            files.append(TextFile(match, status.st_size, status.st_mtime_ns))
    return files


def _walk(root: str, suffixes: tuple[str, ...], skip: frozenset[str], ignored: Counter[str]) -> Iterator[TextFile]:
    """Every file below `root` with one of `suffixes`, in no particular order; the rest is counted."""
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        ignored["(hidden)"] += 1
                    elif entry.is_dir(follow_symlinks=False):
                        if entry.name not in skip:
                            pending.append(entry.path)
                    elif (reason := _reason_to_ignore(entry, suffixes)) is not None:
                        ignored[reason] += 1
                    else:
                        status = entry.stat()
                        yield TextFile(entry.path, status.st_size, status.st_mtime_ns)
        except OSError as error:
            raise UserError(f"cannot read the folder {folder}: {error.strerror}. Check its permissions") from error


def _reason_to_ignore(entry: os.DirEntry[str], suffixes: tuple[str, ...]) -> str | None:
    if suffix(entry.name) not in suffixes:
        return suffix(entry.name) or "(no suffix)"
    if entry.is_dir():
        return "(link to a folder)"
    if not entry.is_file():
        return "(broken link)" if entry.is_symlink() else "(not a file)"
    return None if entry.stat().st_size else "(empty)"


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}. Check its permissions") from error


def _accepted() -> str:
    return ", ".join(PLAIN + LINES) + " (also with .gz)"
