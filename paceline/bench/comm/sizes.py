"""Sizes and bandwidths of a collective, as nccl-tests defines them.

The definitions are those of doc/PERFORMANCE.md in github.com/NVIDIA/nccl-tests. A size S is that of the largest
buffer that the collective is given or fills on one rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from paceline.core.errors import UserError

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}

_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}

SUMS = ("all_reduce", "reduce_scatter", "reduce")
"""Collectives that add."""


def parse_size(text: str, option: str) -> int:
    """Bytes of a size such as "4096", "1k", "25M" or "1G", in powers of 1024.

    Raises:
        UserError: It is no such size; names `option`.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)", text.strip().lower())
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size < 1:
        raise UserError(f"{option}: expected a size such as 4096, 1k, 25M or 1G (powers of 1024), got {text!r}")
    return size


def size_text(size: int) -> str:
    """A size as `parse_size` reads it: 26214400 -> "25M"."""
    for unit in ("G", "M", "k"):
        if size >= _UNITS[unit.lower()] and size % _UNITS[unit.lower()] == 0:
            return f"{size // _UNITS[unit.lower()]}{unit}"
    return str(size)


def element_counts(smallest: int, largest: int, factor: int, itemsize: int, ranks: int) -> list[int]:
    """Elements of the buffers to measure: sizes grow by `factor` and are rounded down to whole shards for each rank.

    Args:
        smallest: Bytes.
        largest: Bytes; the last size is at most this.
        factor: At least 2.
        itemsize: Bytes of an element.
        ranks: Number of shards.
    """
    counts = []
    while smallest <= largest:
        counts.append(max(smallest // itemsize // ranks, 1) * ranks)
        smallest *= factor
    return list(dict.fromkeys(counts))


def per_rank_count(op: str, numel: int, ranks: int) -> int:
    """nccl-tests' column "count": elements that a rank passes, of a collective over `numel` elements."""
    sharded = op in ("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather")
    return numel // ranks if sharded else numel


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """S / t, in GB/s (1e9 bytes a second)."""
    return size / seconds / 1e9


def bus_bandwidth(op: str, size: int, seconds: float, ranks: int) -> float:
    """What the slowest link would carry if it were the limit, in GB/s: comparable between numbers of ranks."""
    return algorithm_bandwidth(size, seconds) * _BUS_FACTORS[op](ranks)
