"""The sharded units that lie gathered, by slot, with the values that they have now."""

from __future__ import annotations

from paceline.core.layout import Bucket
from paceline.core.schedule import Schedule


class Unsharded:
    """Follows the slots that the schedule gives units, and the buckets that stay gathered for a whole step."""

    def __init__(self, schedule: Schedule) -> None:
        """Nothing is gathered yet."""
        self._slot_of = dict(schedule.slot)
        self._kept = frozenset(bucket.name for bucket in schedule.kept_buckets)
        self._unit_in: dict[int, str] = {}
        self._fresh: set[str] = set()

    def begin(self, bucket: Bucket) -> str | None:
        """A gather of a bucket begins: its unit is the one in its slot from now on; returns the one that was."""
        if bucket.name in self._kept:
            self._fresh.add(bucket.name)
            return None
        (unit,) = bucket.units
        slot = self._slot_of[unit]
        before, self._unit_in[slot] = self._unit_in.get(slot), unit
        return None if before == unit else before

    def holds(self, unit: str) -> bool:
        """Whether a unit's parameters lie in its slot since the last update, or are on their way."""
        slot = self._slot_of.get(unit)
        return slot is None or self._unit_in.get(slot) == unit

    def holds_kept(self) -> bool:
        """Whether everything that is gathered once a step has been, since the last update."""
        return self._fresh == self._kept

    def forget(self) -> None:
        """Forgets what is gathered: its values are stale."""
        self._unit_in.clear()
        self._fresh.clear()
