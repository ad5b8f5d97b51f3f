"""Tokenised text on disk: facts, tokenizer and two memory-mapped token files in one folder, and their checksums."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError
from paceline.data.checksums import Blocks, block_count, checksums
from paceline.data.progress_bar import Report
from paceline.data.tokenise import token_dtype

FACTS = "facts.json"
TOKENIZER = "tokenizer.json"
TRAIN = "train.bin"
VALIDATION = "validation.bin"
CHECKSUMS = "checksums.bin"
"""Of the blocks of the other four, one after another. Written last; without it there is no corpus."""

CHECKED_AT_ONCE = 64 << 20
"""Bytes of tokens that are checked when a corpus is opened, which takes a moment; of more, blocks as they are used."""


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
        baseline_bytes: bytes of held-out text the compressors were given.
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
    baseline_bytes: int
    gzip_bits_per_byte: float
    xz_bits_per_byte: float

    def to_json(self) -> str:
        """The facts as indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Facts:
        """The reverse of `to_json`; raises ValueError where it does not fit."""
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True)
class TokenFile:
    """Tokens of one side of the split, mapped from disk and read on use.

    Attributes:
        path: the file.
        bytes: bytes of text behind the tokens.
        tokens: all tokens, shape (count,), uint16 or uint32, read-only.
        blocks: the bytes of `tokens` with their checksums; None for tokens that are in no file.
    """

    path: Path
    bytes: int
    tokens: NDArray[np.unsignedinteger] = field(repr=False, compare=False)
    blocks: Blocks | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def damaged(self, start: int, stop: int) -> int | None:
        """The byte of the file from which on the tokens [start, stop) are not what was written; None if they are."""
        if self.blocks is None:
            return None
        size = self.tokens.itemsize
        return self.blocks.damaged(start * size, min(stop, len(self)) * size)

    def check(self, start: int, stop: int) -> None:
        """See that the tokens [start, stop) are what was written.

        Raises:
            UserError: they are not. The entry is marked, so that the next start prepares it anew.
        """
        found = self.damaged(start, stop)
        if found is None:
            return
        try:
            (self.path.parent / CHECKSUMS).unlink(missing_ok=True)
            advice = "Start again: the text is prepared anew"
        except OSError:
            advice = f"Remove {self.path.parent} and start again: the text is prepared anew"
        raise UserError(f"{self.path} is damaged: from byte {found:,} on it is not what was written. {advice}")


@dataclass(frozen=True)
class Corpus:
    """A text ready for training.

    Attributes:
        folder: the cache entry it lies in.
        facts: what it holds.
        tokenizer: path of its tokenizer.json.
        definition: what that holds, which stays where the entry is removed.
        train: tokens to train on.
        validation: held-out tokens.
    """

    folder: Path
    facts: Facts
    tokenizer: Path
    definition: str = field(repr=False)
    train: TokenFile
    validation: TokenFile


def seal_corpus(folder: Path) -> None:
    """Write the checksums of a corpus, the last of its files."""
    sums = np.concatenate([checksums(folder / name) for name in (FACTS, TOKENIZER, TRAIN, VALIDATION)])
    (folder / CHECKSUMS).write_bytes(sums.astype("<u4").tobytes())


def open_corpus(folder: Path, report: Report | None = None) -> Corpus | None:
    """Map the corpus in `folder`.

    Facts, tokenizer and sizes are checked, and few tokens too; many are checked as they are used.

    Args:
        folder: where `seal_corpus` has been.
        report: is told where there is a corpus, but damaged.

    Returns:
        The corpus; None if there is none that is sound.
    """
    if not folder.is_dir():
        return None
    try:
        return _open(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if report is not None:
            report(f"the prepared text in {folder} is damaged ({_in_one_line(error)}): it is prepared anew")
        return None


def _open(folder: Path) -> Corpus:
    """The same; raises what is wrong."""
    facts = Facts.from_json((folder / FACTS).read_text(encoding="utf-8"))
    dtype = token_dtype(facts.vocabulary)
    expected = {
        FACTS: os.path.getsize(folder / FACTS),
        TOKENIZER: facts.tokenizer_bytes,
        TRAIN: facts.train.tokens * dtype.itemsize,
        VALIDATION: facts.validation.tokens * dtype.itemsize,
    }
    for name, size in expected.items():
        if (found := os.path.getsize(folder / name)) != size:
            raise ValueError(f"{name} has {found:,} bytes, expected {size:,}")
    sums = np.fromfile(folder / CHECKSUMS, "<u4").astype(np.uint32)
    ends = np.cumsum([block_count(size) for size in expected.values()])
    if len(sums) != ends[-1]:
        raise ValueError(f"{CHECKSUMS} has {len(sums):,} checksums, expected {ends[-1]:,}")
    of = dict(zip(expected, np.split(sums, ends[:-1]), strict=True))
    for name in (FACTS, TOKENIZER):
        if not np.array_equal(checksums(folder / name), of[name]):
            raise ValueError(f"{name} is not what was written")
    train = _map(folder / TRAIN, facts.train.bytes, dtype, of[TRAIN])
    validation = _map(folder / VALIDATION, facts.validation.bytes, dtype, of[VALIDATION])
    if expected[TRAIN] + expected[VALIDATION] <= CHECKED_AT_ONCE:
        for file in (train, validation):
            if (byte := file.damaged(0, len(file))) is not None:
                raise ValueError(f"{file.path.name} is not what was written, from byte {byte:,} on")
    definition = (folder / TOKENIZER).read_text(encoding="utf-8")
    return Corpus(folder, facts, folder / TOKENIZER, definition, train, validation)


def _map(path: Path, size: int, dtype: np.dtype[np.unsignedinteger], sums: NDArray[np.uint32]) -> TokenFile:
    tokens = np.memmap(path, dtype=dtype, mode="r")
    return TokenFile(path, size, tokens, Blocks(tokens.view(np.uint8), sums))


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name}: {error.strerror}"
    return str(error).partition("\n")[0]
