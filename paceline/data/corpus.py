"""Tokenised text on disk: facts, tokenizer and two memory-mapped token files in one folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.tokenise import token_dtype

FACTS = "facts.json"
TOKENIZER = "tokenizer.json"
TRAIN = "train.bin"
VALIDATION = "validation.bin"


@dataclass(frozen=True)
class SplitFacts:
    """One side of the split.

    Attributes:
        documents: number of documents.
        bytes: bytes of text.
        tokens: tokens on disk, with one end-of-text token at the start and one after each document.
    """

    documents: int
    bytes: int
    tokens: int


@dataclass(frozen=True)
class Facts:
    """What a corpus holds.

    Attributes:
        source: what the user calls the text.
        files: number of files read.
        ignored: entries passed over, by suffix or by reason in parentheses.
        vocabulary: every token id is below it.
        end_of_text: the id that begins a token file and follows each document.
        tokenizer_bytes: size of tokenizer.json.
        train: the training side.
        validation: the held-out side.
        yardstick_bytes: bytes of held-out text the compressors were given.
        gzip_bits_per_byte: bits `gzip -9` needs for each byte of them.
        xz_bits_per_byte: bits `xz -9e` needs for each byte of them.
    """

    source: str
    files: int
    ignored: dict[str, int]
    vocabulary: int
    end_of_text: int
    tokenizer_bytes: int
    train: SplitFacts
    validation: SplitFacts
    yardstick_bytes: int
    gzip_bits_per_byte: float
    xz_bits_per_byte: float

    def to_json(self) -> str:
        """The facts as indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Facts:
        """The reverse of `to_json`; raises ValueError, KeyError or TypeError where it does not fit."""
        fields: dict[str, Any] = json.loads(text)
        for side in ("train", "validation"):
            fields[side] = SplitFacts(**fields[side])
        return cls(**fields)


@dataclass(frozen=True)
class TokenFile:
    """Tokens of one side of the split, mapped from disk and read on use.

    Attributes:
        path: the file.
        bytes: bytes of text behind the tokens.
        tokens: all tokens, shape (count,), uint16 or uint32, read-only.
    """

    path: Path
    bytes: int
    tokens: NDArray[np.unsignedinteger] = field(repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Corpus:
    """A text ready for training.

    Attributes:
        folder: the cache entry it lies in.
        facts: what it holds.
        tokenizer: path of its tokenizer.json.
        train: tokens to train on.
        validation: held-out tokens.
    """

    folder: Path
    facts: Facts
    tokenizer: Path
    train: TokenFile
    validation: TokenFile


def open_corpus(folder: Path) -> Corpus | None:
    """Map the corpus in `folder`; None if there is none, or not one whose files have their full size."""
    try:
        facts = Facts.from_json((folder / FACTS).read_text(encoding="utf-8"))
        dtype = token_dtype(facts.vocabulary)
        expected = {
            TOKENIZER: facts.tokenizer_bytes,
            TRAIN: facts.train.tokens * dtype.itemsize,
            VALIDATION: facts.validation.tokens * dtype.itemsize,
        }
        if any(os.path.getsize(folder / name) != size for name, size in expected.items()):
            return None
        return Corpus(
            folder,
            facts,
            folder / TOKENIZER,
            _map(folder / TRAIN, facts.train.bytes, dtype),
            _map(folder / VALIDATION, facts.validation.bytes, dtype),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _map(path: Path, size: int, dtype: np.dtype[np.unsignedinteger]) -> TokenFile:
    return TokenFile(path, size, np.memmap(path, dtype=dtype, mode="r"))
