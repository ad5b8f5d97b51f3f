"""Byte-level BPE tokenizers, by the `tokenizers` package: trained here or read from a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer:
    """Text to token ids and back.

    Text is taken literally: a document that contains the characters of a special token is encoded as
    those characters. Tokenizers trained here are lossless for any text.

    Attributes:
        vocabulary: number of ids; every id is below it.
        end_of_text: the id that ends a document.
    """

    def __init__(self, definition: str, source: str) -> None:
        """Read a tokenizer.

        Args:
            definition: the content of a tokenizer.json.
            source: what to call it in messages.

        Raises:
            UserError: it is not a tokenizer, or none of its tokens ends a text.
        """
        library = _library()
        try:
            backend = library.Tokenizer.from_str(definition)
        except Exception as error:  # the package raises plain Exception
            raise UserError(f"{source} is not a tokenizer.json of the tokenizers package: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        end = next((ids[token] for token in KNOWN_ENDS if token in ids), None)
        if end is None:
            raise UserError(
                f"{source} has no token that ends a text: expected one of {', '.join(KNOWN_ENDS)}. "
                f"Add {END_OF_TEXT} to it as a special token"
            )
        self._backend: Any = backend
        self.vocabulary = max(ids.values()) + 1
        self.end_of_text = end

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json file.

        Raises:
            UserError: the file is missing, unreadable or not a tokenizer.
        """
        return cls(read_definition(path), str(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; nothing is added before or after it."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Token ids of each text as an array; runs outside the interpreter's lock."""
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Bytes that do not form whole characters come out as U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text


def train(texts: Iterable[str], vocabulary: int) -> str:
    """Train a byte-level BPE tokenizer; the same texts give the same tokenizer to the byte.

    Args:
        texts: training documents.
        vocabulary: number of entries wanted, at least 257; little text may give fewer.

    Returns:
        The content of a tokenizer.json.
    """
    library = _library()
    backend = library.Tokenizer(library.models.BPE())
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    definition: str = backend.to_str(pretty=True)
    return definition


def read_definition(path: str | Path) -> str:
    """The text of a tokenizer.json.

    Raises:
        UserError: the file is missing, unreadable or not text.
    """
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the tokenizer {path}: {error}. Expected a tokenizer.json; "
            "leave data.tokenizer empty to train one"
        ) from error


def _library() -> ModuleType:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise UserError("text needs the tokenizers package: pip install 'paceline[text]'") from error
    return tokenizers
