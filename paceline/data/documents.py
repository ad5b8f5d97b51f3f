"""Files become documents: the units that are hashed, split and tokenised.

A plain file is one document, a line of a .jsonl file is one document. A plain text larger than
`LARGE` is streamed as consecutive documents of about `PIECE` bytes, so that it is never whole in
memory and can be split by document.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple, cast

from paceline.core.errors import UserError
from paceline.data.sources import LINES, TextFile, suffix

LARGE = 1 << 20
PIECE = 64 << 10


class Document(NamedTuple):
    """One document.

    Attributes:
        name: where it comes from, for messages; two documents may share a name.
        content: its text as UTF-8, never empty.
    """

    name: str
    content: bytes


def read(files: Iterable[TextFile], text_field: str, unreadable: dict[str, str] | None = None) -> Iterator[Document]:
    """Every document of `files`, in order, with at most one large file's window in memory.

    Args:
        files: files with a known suffix.
        text_field: the field of a .jsonl line that holds the text.
        unreadable: gets, by path, why a file cannot be read, instead of an error; what was read of it until then has
            been given out.

    Raises:
        UserError: a file is gone, not readable, not UTF-8 text, not valid gzip, or a .jsonl line is not
            an object with a string in `text_field`.
    """
    for file in files:
        try:
            yield from _documents(file.path, text_field)
        except UserError as error:
            if unreadable is None:
                raise
            unreadable[file.path] = str(error)


def _documents(path: str, text_field: str) -> Iterator[Document]:
    try:
        with _open(path) as stream:
            if suffix(path) in LINES:
                yield from _lines(stream, path, text_field)
            else:
                yield from _plain(stream, path)
    except FileNotFoundError as error:
        raise UserError(f"{path} was removed while it was being read. Start again") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a complete gzip file ({error}). Compress it anew") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}. Check its permissions") from error


def divide(content: bytes, size: int) -> Iterator[bytes]:
    """Cut UTF-8 text into consecutive pieces of at most `size` bytes that concatenate to `content`.

    Cuts fall after a blank line, else after a newline, if one lies in the piece's second half, else
    between two characters.

    Args:
        content: the text.
        size: bytes, at least 4, the length of the longest character.
    """
    start = 0
    while start < len(content):
        end = _cut(content, start, size)
        yield content[start:end]
        start = end


def _open(path: str) -> BinaryIO:
    if path.lower().endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    return open(path, "rb")


def _plain(stream: BinaryIO, path: str) -> Iterator[Document]:
    offset = 0
    for piece in _pieces(stream):
        _check_text(piece, path, offset)
        yield Document(path if offset == 0 else f"{path} at byte {offset}", piece)
        offset += len(piece)


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    """A small stream whole; a large one as `divide` would cut it, reading `LARGE` bytes at a time."""
    window = stream.read(LARGE + 1)
    if len(window) <= LARGE:
        if window:
            yield window
        return
    start = 0
    while True:
        if len(window) - start <= PIECE:
            window = window[start:] + stream.read(LARGE)
            start = 0
            if not window:
                return
        end = _cut(window, start, PIECE)
        yield window[start:end]
        start = end


def _cut(content: bytes, start: int, size: int) -> int:
    """Where the piece that begins at `start` ends."""
    limit = start + size
    if limit >= len(content):
        return len(content)
    for separator in (b"\n\n", b"\n\r\n", b"\n"):
        found = content.rfind(separator, start + size // 2, limit)
        if found >= 0:
            return found + len(separator)
    end = limit
    while content[end] & 0xC0 == 0x80 and limit - end < 3:  # a character of up to 4 bytes began earlier
        end -= 1
    return end


def _check_text(content: bytes, path: str, offset: int) -> None:
    """Raise unless `content`, which begins at byte `offset` of the file, is UTF-8 without NUL bytes."""
    null = content.find(b"\0")
    if null >= 0:
        raise UserError(f"{path} is not text: a NUL byte at byte {offset + null}. Expected UTF-8; remove or convert it")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte {offset + error.start} is 0x{content[error.start]:02x} "
            f"({error.reason}). Convert it to UTF-8 or remove it"
        ) from error


def _lines(stream: BinaryIO, path: str, text_field: str) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        if line.isspace():
            continue
        name = f"{path} line {number}"
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
            raise UserError(f"{name} is not valid JSON: {error}. Expected one object a line") from error
        if not isinstance(record, dict):
            raise UserError(f"{name} holds a {type(record).__name__}. Expected an object with field {text_field!r}")
        text = record.get(text_field)
        if not isinstance(text, str):
            what = "is not a string" if text_field in record else "is missing"
            raise UserError(
                f"{name}: field {text_field!r} {what}. It has {', '.join(map(repr, record)) or 'no fields'}; "
                "choose one with data.text_field"
            )
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{name}: field {text_field!r} holds half a surrogate pair ({error})") from error
        if content:
            yield Document(name, content)
