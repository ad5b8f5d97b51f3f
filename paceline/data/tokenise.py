"""The second reading of the text: documents to token files, in parallel and in order.

Threads are enough: the tokenizer works outside the interpreter's lock. No child process exists that an
interrupt could leave behind.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.data.documents import LARGE, PIECE, Document, divide
from paceline.data.split import hash_document, is_validation
from paceline.data.tokenizer import Tokenizer

BATCH_BYTES = 256 << 10  # bounds memory: encoding takes some 30 times a batch's size
BATCH_DOCUMENTS = 1024
BATCHES_AHEAD = 2  # per thread: enough that none waits for the reader


def token_dtype(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """The type of tokens on disk: little-endian uint16 where every id fits, else uint32."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def tokenise(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    threshold: int,
    files: tuple[BinaryIO, BinaryIO],
    threads: int | None,
    advance: Callable[[int], None],
) -> str:
    """Write the tokens of all documents.

    Each file begins with an end-of-text token and every document is followed by one, so that every
    token of every document has a token before it that predicts it.

    Args:
        documents: what to write, in order.
        tokenizer: how to encode it.
        threshold: documents whose split hash is below it go to the second file.
        files: where to write training and validation tokens, in `token_dtype` of the vocabulary.
        threads: how many encode at once; None means one for each core. Does not change what is written.
        advance: called with the bytes of text written since the last call.

    Returns:
        Hexadecimal digest of all documents in order, as `scan` computes it.
    """
    dtype = token_dtype(tokenizer.vocabulary)
    threads = threads or _cores()
    content = hashlib.blake2b(digest_size=16)
    pending: deque[tuple[int, Future[Sides]]] = deque()

    def write_first() -> None:
        size, future = pending.popleft()
        for file, tokens in zip(files, future.result(), strict=True):
            file.write(tokens.tobytes())
        advance(size)

    for file in files:
        file.write(np.array([tokenizer.end_of_text], dtype).tobytes())
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenise")
    try:
        for batch in _batches(documents):
            pending.append((sum(map(len, batch)), pool.submit(_encode, batch, tokenizer, threshold, dtype)))
            for text in batch:
                content.update(hash_document(text).to_bytes())
            if len(pending) > BATCHES_AHEAD * threads:
                write_first()
        while pending:
            write_first()
    finally:
        pool.shutdown(cancel_futures=True)
    return content.hexdigest()


def _cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


Sides = tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]


def _batches(documents: Iterable[Document]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for _, text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: list[bytes], tokenizer: Tokenizer, threshold: int, dtype: np.dtype[np.unsignedinteger]) -> Sides:
    """Training and validation tokens of a batch."""
    end = np.array([tokenizer.end_of_text], dtype)
    sides: tuple[list[NDArray[np.unsignedinteger]], ...] = ([], [])
    small = [text.decode() for text in batch if len(text) <= LARGE]
    encoded = iter(tokenizer.encode_batch(small))
    for text in batch:
        side = sides[is_validation(hash_document(text), threshold)]
        if len(text) <= LARGE:
            side.append(next(encoded).astype(dtype))
        else:  # one long .jsonl line: encoding it whole would take many times its size
            for piece in divide(text, PIECE):
                side.append(tokenizer.encode_batch([piece.decode()])[0].astype(dtype))
        side.append(end)
    none = np.empty(0, dtype)
    return np.concatenate([none, *sides[0]]), np.concatenate([none, *sides[1]])
