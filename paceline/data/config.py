"""What text to train on and how to cut it: the `data` section of a configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.errors import UserError

SMALLEST_VOCABULARY = 257  # every byte, and the token that ends a document


@dataclass(frozen=True)
class DataConfig:
    """The text, the tokenizer and the split.

    Raises:
        UserError: a value is out of its range.
    """

    path: tuple[str, ...] = ()
    """Files, folders or globs of .txt, .py, .md or .jsonl text, each also as .gz. Empty: the source of
    Python's own standard library, which every machine has."""

    tokenizer: str = ""
    """An existing tokenizer.json. Empty: a byte-level BPE tokenizer is trained on the training text."""

    vocabulary: int = 2048
    """Entries of the tokenizer that is trained; without effect where an existing one is given."""

    validation: float = 0.05
    """Fraction of the documents held out for validation, chosen by a hash of each document's content."""

    text_field: str = "text"
    """The field of a .jsonl line that holds the text."""

    unreadable: Literal["skip", "refuse"] = "skip"
    """What becomes of files that are no readable text: passed over, or listed in an error."""

    cache: str = ""
    """Folder for tokenised text. Empty: $PACELINE_CACHE, else ~/.cache/paceline."""

    def __post_init__(self) -> None:
        path: object = self.path  # a library user may not run a type checker
        if isinstance(path, str):
            raise UserError(f"data.path is a list of paths, not one string: write ({path!r},)")
        if any(not path for path in self.path):
            raise UserError("data.path holds an empty string: name a file, a folder or a glob")
        if self.vocabulary < SMALLEST_VOCABULARY:
            raise UserError(
                f"data.vocabulary is {self.vocabulary}, but needs at least {SMALLEST_VOCABULARY}: "
                "256 bytes and the end of a document"
            )
        if not 0.0 < self.validation < 1.0:
            raise UserError(
                f"data.validation is {self.validation}, but is a fraction of the documents: "
                "choose a number between 0 and 1, such as 0.05"
            )
        if not self.text_field:
            raise UserError("data.text_field is empty: name the field of a .jsonl line that holds the text")

    @property
    def cache_folder(self) -> Path:
        """Where tokenised text is kept: `cache`, else $PACELINE_CACHE, else ~/.cache/paceline."""
        chosen = self.cache or os.environ.get("PACELINE_CACHE") or "~/.cache/paceline"
        return Path(chosen).expanduser().absolute()
