"""Which tokens belong to which step, rank and micro-batch: pure functions of (seed, step).

Sample i of a token file with context c is tokens[i*c : i*c + c + 1]: inputs without the last token,
targets without the first. Nothing here depends on the number of ranks but `share`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError

IGNORED_TARGET = -100  # torch's cross_entropy skips it by default
ROUNDS = 8

LeftOut = Sequence[tuple[int, int]]
"""Global batches that no step takes: (s, n) for each n that would have come before step s, counted from 0."""


def sample_count(tokens: int, context: int) -> int:
    """Number of samples in a file: ceil((tokens - 1) / context); the last may be short."""
    return max(0, -(-(tokens - 1) // context))


def gather(
    tokens: NDArray[np.unsignedinteger], indices: NDArray[np.int64], context: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs and targets of samples.

    Args:
        tokens: a token file, shape (count,).
        indices: samples, shape (b,), each below `sample_count(count, context)`.
        context: tokens in a sample.

    Returns:
        Inputs and targets, int64, shape (b, context). A short sample is padded with token 0 in its
        inputs and `IGNORED_TARGET` in its targets.
    """
    inputs = np.zeros((len(indices), context), np.int64)
    targets = np.full((len(indices), context), IGNORED_TARGET, np.int64)
    for row, index in enumerate(indices.tolist()):
        window = tokens[index * context : (index + 1) * context + 1]
        inputs[row, : len(window) - 1] = window[:-1]
        targets[row, : len(window) - 1] = window[1:]
    return inputs, targets


def permute(seed: int, epoch: int, indices: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Places of `indices` in the shuffled order of range(n) of one epoch, in constant memory.

    A Feistel network permutes the smallest even number of bits that holds n; where it leaves range(n) it
    is applied again (cycle walking), so that the whole is a bijection on range(n).
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.

    Args:
        seed: any integer.
        epoch: any integer; each (seed, epoch) has its own order.
        indices: shape (b,), each in range(n).
        n: number of items, at most 2**62.

    Returns:
        int64, shape (b,), each in range(n).

    Raises:
        ValueError: an index is not in range(n).
    """
    if len(indices) and (indices.min() < 0 or indices.max() >= n):
        raise ValueError(f"indices reach from {indices.min()} to {indices.max()}, expected range({n})")
    half = max(1, -(-(n - 1).bit_length() // 2))
    keys = _round_keys(seed, epoch)
    places = _feistel(indices.astype(np.uint64), keys, half)
    outside = np.flatnonzero(places >= n)
    while len(outside):
        places[outside] = _feistel(places[outside], keys, half)
        outside = outside[places[outside] >= n]
    return places.astype(np.int64)


def global_batch(seed: int, step: int, batch_size: int, n: int) -> NDArray[np.int64]:
    """Samples of one optimizer step, over all ranks.

    Epochs follow one another without end, each in an order of its own; step s takes positions
    [s * batch_size, (s + 1) * batch_size). Where a batch crosses an epoch's end it takes the tail of
    one and the head of the next: inside an epoch nothing is dropped and nothing repeated.

    Args:
        seed: fixes the order.
        step: optimizer step, from 0.
        batch_size: samples in a step, summed over ranks.
        n: number of samples, at least 1.

    Returns:
        int64, shape (batch_size,).
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, indices = np.divmod(positions, n)
    batch = np.empty_like(indices)
    for epoch in np.unique(epochs).tolist():
        inside = epochs == epoch
        batch[inside] = permute(seed, epoch, indices[inside], n)
    return batch


def batch_number(step: int, left_out: LeftOut) -> int:
    """Which global batch a step takes, both counted from 0."""
    return step + sum(count for before, count in left_out if before <= step)


def share(indices: NDArray[np.int64], rank: int, world_size: int, micro_batch: int) -> list[NDArray[np.int64]]:
    """One rank's part of a global batch as micro-batches.

    Parts are disjoint, complete, and differ by at most one sample. Every rank gets the same number
    of micro-batches, as equal in size as can be; one may be empty on a rank with a smaller part.

    Args:
        indices: the global batch, shape (batch_size,).
        rank: this rank.
        world_size: number of ranks.
        micro_batch: most samples in a micro-batch.

    Returns:
        int64 arrays of at most `micro_batch` samples each.

    Raises:
        UserError: there are fewer samples than ranks.
    """
    size = len(indices)
    if size < world_size:
        raise UserError(
            f"a batch of {size} cannot be shared by {world_size} ranks: each needs at least one sample. "
            f"Raise the batch size to {world_size} or more, or use at most {size} workers"
        )
    largest = -(-size // world_size)
    parts = -(-largest // micro_batch)
    mine = indices[_part(size, rank, world_size)]
    return [mine[_part(len(mine), part, parts)] for part in range(parts)]


def validation_share(n: int, rank: int, world_size: int) -> range:
    """This rank's samples of range(n): consecutive, disjoint, complete; ranks differ by at most one."""
    return range(n)[_part(n, rank, world_size)]


def _part(size: int, index: int, count: int) -> slice:
    """The index-th of `count` consecutive parts whose sizes differ by at most one."""
    if not 0 <= index < count:
        raise ValueError(f"part {index} of {count} does not exist")
    return slice(size * index // count, size * (index + 1) // count)


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return list(np.frombuffer(digest, "<u8").astype(np.uint64))


def _feistel(values: NDArray[np.uint64], keys: list[np.uint64], half: int) -> NDArray[np.uint64]:
    """A permutation of the numbers of 2 * half bits."""
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every output bit depends on every input bit (finaliser of splitmix64, modulo 2**64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
