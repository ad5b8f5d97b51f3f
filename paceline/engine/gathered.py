"""Memory that sharded units are gathered into, and which of them lie there as they are now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.layout import ALIGNMENT, Bucket
from paceline.schedule import Schedule


class Gathered:
    """Units in the places that the schedule gives them, and those that stay from one use in a step to the next.

    Attributes:
        whole: What each bucket's parameters are gathered into, by the bucket's name.
    """

    def __init__(self, schedule: Schedule, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        """Allocates the places; nothing lies in them yet.

        Args:
            schedule: Gives places, and what they hold.
            dtypes: Of the layout's flats.
            device: Where the places live.
        """
        self._place_of = dict(schedule.place)
        self._resident = frozenset(bucket.name for bucket in schedule.residents)
        self._held: dict[int, str] = {}
        self._fresh: set[str] = set()
        sizes: dict[int, int] = {}
        spans: list[tuple[Bucket, int, int]] = []
        for unit, place in schedule.place.items():
            offset = 0
            for bucket in schedule.moving[unit]:
                spans.append((bucket, place, offset))
                offset += -(-bucket.bytes // ALIGNMENT) * ALIGNMENT
            sizes[place] = max(sizes.get(place, 0), offset)
        rooms = {place: torch.zeros(size, dtype=torch.uint8, device=device) for place, size in sizes.items()}
        self.whole: dict[str, Tensor] = {
            bucket.name: rooms[place][offset : offset + bucket.bytes].view(dtypes[bucket.flat])
            for bucket, place, offset in spans
        }
        for bucket in schedule.residents:
            self.whole[bucket.name] = torch.zeros(bucket.numel, dtype=dtypes[bucket.flat], device=device)

    def begin(self, bucket: Bucket) -> None:
        """A gather of a bucket begins: its unit is the one in its place from now on."""
        if bucket.name in self._resident:
            self._fresh.add(bucket.name)
        else:
            self._held[self._place_of[bucket.units[0]]] = bucket.units[0]

    def holds(self, unit: str) -> bool:
        """Whether a unit's parameters lie in its place since the last update, or are on their way."""
        place = self._place_of.get(unit)
        return place is None or self._held.get(place) == unit

    def holds_residents(self) -> bool:
        """Whether everything that is gathered once a step has been, since the last update."""
        return self._fresh == self._resident

    def forget(self) -> None:
        """What was gathered is stale."""
        self._held.clear()
        self._fresh.clear()
