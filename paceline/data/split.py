"""Which documents are held out: a pure function of each document's content.

A document's hash is a uniform 64-bit number; documents below a threshold are held out. Order, names and
positions play no part, so adding files never moves an old document, and copies of one document never
stand on both sides.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

SPACE = 1 << 64


class DocumentHash(NamedTuple):
    """Two independent uniform 64-bit numbers made from a document's content.

    Attributes:
        split: decides between training and validation.
        priority: orders documents for the tokenizer's sample.
    """

    split: int
    priority: int

    def to_bytes(self) -> bytes:
        """16 bytes that identify the content."""
        return self.split.to_bytes(8, "little") + self.priority.to_bytes(8, "little")


def hash_document(content: bytes) -> DocumentHash:
    """The hash of a document: blake2b of its bytes."""
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return DocumentHash(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


def nominal_threshold(fraction: float) -> int:
    """The threshold that holds out `fraction` (0 to 1) of all documents on average."""
    return int(fraction * SPACE)


def settled_threshold(fraction: float, lowest: int, highest: int) -> int | None:
    """The threshold to use for documents whose `split` hashes span `lowest` to `highest`.

    Where chance would leave one side empty, the lowest hash is held out, or the highest kept for
    training.

    Returns:
        The threshold, or None if all documents have one hash and cannot be told apart.
    """
    if lowest == highest:
        return None
    return min(max(nominal_threshold(fraction), lowest + 1), highest)


def is_validation(document: DocumentHash, threshold: int) -> bool:
    """Whether a document is held out."""
    return document.split < threshold
