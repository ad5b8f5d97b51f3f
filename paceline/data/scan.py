"""The first reading of the text: what it holds, how it splits, and samples of both sides."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from paceline.core.errors import UserError
from paceline.data.documents import Document, divide
from paceline.data.split import (
    DocumentHash,
    hash_document,
    is_validation,
    nominal_threshold,
    settled_threshold,
)

SAMPLE_BYTES = 16 << 20
HELD_OUT_BYTES = 16 << 20


@dataclass(frozen=True)
class Scan:
    """What one reading found. Counts are (training, validation).

    Attributes:
        content: hexadecimal digest of all documents in order.
        threshold: documents whose split hash is below it are held out.
        documents: number of documents.
        sizes: bytes of text.
        sample: training documents for the tokenizer, at most `SAMPLE_BYTES`, spread over all of the text.
        held_out: the first `HELD_OUT_BYTES` of the validation documents, concatenated.
    """

    content: str
    threshold: int
    documents: tuple[int, int]
    sizes: tuple[int, int]
    sample: list[bytes]
    held_out: bytes


Reader = Callable[[], Iterator[Document]]


def scan(read: Reader, fraction: float, advance: Callable[[int], None]) -> tuple[Scan, Reader]:
    """Read all documents once, in bounded memory; again only where the usual split leaves a side empty.

    Args:
        read: starts reading the documents from the first; called anew for each reading.
        fraction: the part of the documents to hold out.
        advance: called with the bytes of each document read.

    Returns:
        What was found, and how to read the documents it speaks of: `read` itself, or, where all of the
        text is one document, its sections.

    Raises:
        UserError: there is no text, or it cannot be divided in two.
    """
    threshold = nominal_threshold(fraction)
    found, lowest, highest = _read_once(read, threshold, advance)
    settled = settled_threshold(fraction, lowest, highest)
    if settled is None:
        read = partial(_sections, read, fraction)
        found, lowest, highest = _read_once(read, threshold, advance)
        settled = settled_threshold(fraction, lowest, highest)
        if settled is None:
            raise UserError(
                "the text is one document that repeats itself or is shorter than 8 bytes, so that nothing "
                "can be held out for validation. Point data.path at more text"
            )
    if settled != threshold:
        found, _, _ = _read_once(read, settled, advance)
    return found, read


def _sections(read: Reader, fraction: float) -> Iterator[Document]:
    """Cut documents so that one section is about the smaller side of the split."""
    for document in read():
        size = max(4, int(len(document.content) * min(fraction, 1 - fraction)))
        for number, section in enumerate(divide(document.content, size), start=1):
            yield Document(f"{document.name} section {number}", section)


def _read_once(read: Reader, threshold: int, advance: Callable[[int], None]) -> tuple[Scan, int, int]:
    """A Scan for `threshold`, with the lowest and the highest split hash."""
    content = hashlib.blake2b(digest_size=16)
    documents, size = [0, 0], [0, 0]
    lowest, highest = None, -1
    sample = Sample(SAMPLE_BYTES)
    held_out = bytearray()
    for _, text in read():
        key = hash_document(text)
        content.update(key.to_bytes())
        side = int(is_validation(key, threshold))
        documents[side] += 1
        size[side] += len(text)
        lowest = key.split if lowest is None else min(lowest, key.split)
        highest = max(highest, key.split)
        if side:
            held_out += text[: HELD_OUT_BYTES - len(held_out)]
        else:
            sample.offer(key, text)
        advance(len(text))
    if lowest is None:
        raise UserError("no text found: every document is empty. Point data.path at text")
    found = Scan(
        content.hexdigest(),
        threshold,
        (documents[0], documents[1]),
        (size[0], size[1]),
        sample.documents(),
        bytes(held_out),
    )
    return found, lowest, highest


class Sample:
    """The documents of lowest priority number that fit into a number of bytes, in whichever order they come."""

    def __init__(self, limit: int) -> None:
        """Start empty; `limit` is in bytes."""
        self._limit = limit
        self._size = 0
        self._bar: int | None = None  # documents at or above it do not fit
        self._heap: list[tuple[int, bytes]] = []  # (minus priority, text): the first is the next to go

    def offer(self, key: DocumentHash, text: bytes) -> None:
        """Keep a document if it belongs to the sample so far. Longer than the limit, it is cut."""
        if self._bar is not None and key.priority >= self._bar:
            return
        if len(text) > self._limit:
            text = next(divide(text, self._limit))
        heapq.heappush(self._heap, (-key.priority, text))
        self._size += len(text)
        while self._size > self._limit:
            negative, dropped = heapq.heappop(self._heap)
            self._bar = -negative
            self._size -= len(dropped)

    def documents(self) -> list[bytes]:
        """The sample in order of priority."""
        return [text for _, text in sorted(self._heap, reverse=True)]
