"""What ranks give to a collective, what it must give back, and how many elements are wrong."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.collectives.rounds import chunk

GIVES_SHARD = ("all_gather", "gather")
"""Collectives to which a rank gives its shard alone; to others it gives a whole buffer."""

GETS_SHARD = ("reduce_scatter", "scatter")
"""Collectives from which a rank gets its shard alone."""

_BLOCK = 1 << 16
"""Elements that are made and compared at a time, so that they stay in the core's cache."""


class Piece(NamedTuple):
    """Elements [start, stop) of a result: the sum of elements [first, ...) of the data of some ranks."""

    start: int
    stop: int
    first: int
    sources: tuple[int, ...]


def values(rank: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Elements [start, stop) of a rank's data: random in [-1, 1), the same wherever they are asked for."""
    parts = []
    for block in range(start // _BLOCK, (stop - 1) // _BLOCK + 1):
        # torch's generator on CPUs looks at 32 bits of its seed.
        generator = torch.Generator().manual_seed((block << 12) + rank)
        data = torch.rand(_BLOCK, generator=generator, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        offset = block * _BLOCK
        parts.append(data[max(start - offset, 0) : stop - offset])
    return torch.cat(parts).mul_(2).sub_(1).to(dtype)


def fill(op: str, rank: int, ranks: int, given: Tensor, numel: int) -> None:
    """Writes what a rank gives to a collective over `numel` elements into `given`."""
    first = chunk(rank, ranks, numel)[0] if op in GIVES_SHARD else 0
    for start in range(0, given.numel(), _BLOCK):
        target = given[start : start + _BLOCK]
        target.copy_(values(rank, first + start, first + start + target.numel(), given.dtype))


def expected(op: str, rank: int, ranks: int, numel: int) -> list[Piece]:
    """What a rank must hold after a collective over `numel` elements; nothing where that is undefined.

    "copy" stands for a rank's copy of its own data.
    """
    everyone = tuple(range(ranks))
    own_start, own_stop = chunk(rank, ranks, numel)
    size = own_stop - own_start
    whole = Piece(0, numel, 0, everyone)
    if op == "copy":
        return [whole._replace(sources=(rank,))]
    if op == "broadcast":
        return [whole._replace(sources=(0,))]
    if op == "scatter":
        return [Piece(0, size, own_start, (0,))]
    if op == "reduce_scatter":
        return [Piece(0, size, own_start, everyone)]
    if op == "all_to_all":
        return [Piece(*chunk(source, ranks, numel), own_start, (source,)) for source in everyone]
    if op in ("reduce", "gather") and rank:
        return []
    if op in ("all_reduce", "reduce"):
        return [whole]
    if op in ("all_gather", "gather"):
        bounds = [(source, *chunk(source, ranks, numel)) for source in everyone]
        return [Piece(start, stop, start, (source,)) for source, start, stop in bounds]
    raise ValueError(f"{op}: not a collective that leaves data")


def count_wrong(op: str, rank: int, ranks: int, result: Tensor, numel: int) -> int:
    """Elements of a rank's result that differ from a reference computed in fp64 by more than the dtype's rounding.

    Copies must be equal. n - 1 additions in any order err by at most (n - 1) u sum|x|, with u half the dtype's
    epsilon (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2); n u sum|x| is allowed.

    Args:
        op: Which collective, or "copy".
        rank: This rank.
        ranks: Number of ranks.
        result: What it holds.
        numel: Elements that the collective is over.
    """
    wrong = 0
    unit = torch.finfo(result.dtype).eps / 2
    for piece in expected(op, rank, ranks, numel):
        for start in range(piece.start, piece.stop, _BLOCK):
            stop = min(start + _BLOCK, piece.stop)
            first = piece.first + start - piece.start
            reference = torch.zeros(stop - start, dtype=torch.float64)
            size = torch.zeros(stop - start, dtype=torch.float64)
            for source in piece.sources:
                data = values(source, first, first + stop - start, result.dtype).double()
                reference += data
                size += data.abs_()
            bound = size * (len(piece.sources) * unit if len(piece.sources) > 1 else 0)
            error = (result[start:stop].cpu().double() - reference).abs()
            # Not "error > bound": what is not a number is wrong too.
            wrong += int((~(error <= bound)).sum())
    return wrong
