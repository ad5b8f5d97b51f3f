"""When units whose parameters are sharded are gathered in a pass: each as early as its slot is free. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from paceline.core.ops import Key, Op, Phase
from paceline.core.transfers import Transfers


class Prefetch:
    """One pass over the units whose parameters are gathered: each as early as its slot is free."""

    def __init__(
        self, transfers: Transfers, phase: Phase, index: int, order: Sequence[str], held: Mapping[int, str]
    ) -> None:
        """Nothing of the pass has run yet; `held` is what lies in the slots."""
        self._transfers, self._phase, self._index = transfers, phase, index
        self._held = dict(held)
        self._coming = deque(unit for unit in order if unit in transfers.slot)
        self._waiting = set(self._coming)
        self._ran: set[str] = set()
        self._arrived: dict[str, tuple[Key, ...]] = {}

    def ahead(self) -> list[Op]:
        """Gathers of the units that come next, as far as there are free slots."""
        ops: list[Op] = []
        while self._coming:
            unit = self._coming[0]
            slot = self._transfers.slot[unit]
            before = self._held.get(slot)
            if before != unit and before in self._waiting:
                break
            self._coming.popleft()
            if before == unit:
                continue
            after = (Key("reshard", before, self._index, self._phase),) if before in self._ran else ()
            gathers = [
                self._transfers.gather(bucket, self._index, self._phase, after)
                for bucket in self._transfers.gathered_buckets[unit]
            ]
            self._held[slot] = unit
            self._arrived[unit] = tuple(op.key for op in gathers)
            ops += gathers
        return ops

    def needs(self, unit: str) -> tuple[Key, ...]:
        """The gathers of a unit's parameters in this pass."""
        return self._arrived.get(unit, ())

    def ran(self, unit: str) -> None:
        """A unit has been computed: its slot is free."""
        self._waiting.discard(unit)
        self._ran.add(unit)
