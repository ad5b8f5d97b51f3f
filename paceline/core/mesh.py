"""Ranks as a mesh of named dimensions, from which every group of ranks comes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

REPLICATE = "replicate"
"""Dimension along which ranks hold copies of the same shards."""

SHARD = "shard"
"""Dimension along which a replica is sharded. The innermost: its ranks are neighbours."""


@dataclass(frozen=True)
class Mesh:
    """Ranks 0 to N - 1 laid out row-major over named dimensions, the outermost first.

    Attributes:
        dimensions: Name and size of each dimension.
    """

    dimensions: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.dimensions)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all dimensions: the group of these is every rank."""
        return tuple(name for name, _ in self.dimensions)

    def extent(self, name: str) -> int:
        """Number of ranks along one dimension."""
        return dict(self.dimensions)[name]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank lies, by dimension."""
        found: dict[str, int] = {}
        for name, size in reversed(self.dimensions):
            rank, found[name] = divmod(rank, size)
        return found

    def group(self, rank: int, along: Iterable[str]) -> tuple[int, ...]:
        """The ranks, in ascending order, that differ from `rank` along some dimensions only.

        Raises:
            KeyError: The mesh has no dimension of that name.
        """
        free = set(along)
        if unknown := free - set(self.names):
            raise KeyError(f"the mesh has dimensions {', '.join(self.names)}, not {', '.join(sorted(unknown))}")
        mine = self.coordinates(rank)
        ranks = [0]
        for name, size in self.dimensions:
            ranks = [first * size + at for first in ranks for at in (range(size) if name in free else (mine[name],))]
        return tuple(ranks)

    def groups(self, along: Iterable[str]) -> list[list[int]]:
        """All groups along some dimensions: each rank is in one, and the groups come in order of their first rank."""
        wanted, found, placed = tuple(along), list[list[int]](), set[int]()
        for rank in range(self.size):
            if rank not in placed:
                found.append(list(self.group(rank, wanted)))
                placed.update(found[-1])
        return found
