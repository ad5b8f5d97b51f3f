"""What chunks of buckets hold as a step goes on, in numbers: whose gradients are added up there, their norm. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paceline.report.chunk_norms import ChunkNorms
from paceline.report.holdings import Holdings


class Summed(NamedTuple):
    """A chunk that has other gradients than before.

    Attributes:
        bucket: Its bucket's number among those shown.
        rank: The rank that has it.
        chunk: Its number; one behind the last is what the rank has apart from the bucket.
        ranks: Those whose gradients are added up in it; "" where none are.
        norm: Of the sum of these gradients; None where it is not finite, or not of the last micro-batch alone.
    """

    bucket: int
    rank: int
    chunk: int
    ranks: str
    norm: float | None


class Sums:
    """Tells what has changed since it was asked last."""

    def __init__(self, holdings: Holdings, norms: ChunkNorms) -> None:
        """As a step begins.

        Args:
            holdings: What ranks hold, which ops change.
            norms: Of the same step.
        """
        self._holdings, self._norms = holdings, norms
        self._before = {bucket.name: holdings.summed(bucket.name) for bucket in holdings.buckets}

    def changed(self, names: Iterable[str], is_known: bool) -> tuple[Summed, ...]:
        """What has changed in some buckets.

        Args:
            names: Of them.
            is_known: Whether the norms are of what is reduced now: of the last micro-batch.
        """
        found: list[Summed] = []
        for name in names:
            before, self._before[name] = self._before[name], self._holdings.summed(name)
            for rank, (had, has) in enumerate(zip(before, self._before[name], strict=True)):
                for chunk, ranks in enumerate(has):
                    if ranks != had[chunk]:
                        found.append(self._summed(name, rank, chunk, ranks, is_known))
        return tuple(found)

    def _summed(self, name: str, rank: int, chunk: int, ranks: frozenset[int], is_known: bool) -> Summed:
        holdings = self._holdings
        is_apart = chunk == holdings.chunks
        norm = None
        # Apart, sums of all micro-batches that were reduced are added up.
        if ranks and is_known and not (is_apart and self._norms.parts > 1):
            norm = self._norms.norm(name, holdings.own(rank) if is_apart else chunk, ranks)
        rounded = None if norm is None else float(f"{norm:.4g}")
        return Summed(holdings.number[name], rank, chunk, named(ranks), rounded)


def named(ranks: frozenset[int]) -> str:
    """Ranks in words: "0, 2 to 4"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(
        f"{first}" if first == last else f"{first}, {last}" if last == first + 1 else f"{first} to {last}"
        for first, last in runs
    )
