"""What each rank holds of each bucket during a step: gradients, with whose are added up, and parameters. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.collectives.rounds import Round
from paceline.core.layout import Bucket
from paceline.core.parameter_server import ParameterServer
from paceline.core.schedule import Schedule

NOTHING, BEFORE, UPDATED = ".", "w", "u"
"""Of a chunk of parameters: not held, as they were before the update, and after it."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Held:
    """A bucket on all ranks, as a page is told of it.

    Attributes:
        bucket: Its number among those shown.
        filled: Percent of its elements that have gradients.
        gradients: A character for each chunk, rank by rank: how many ranks' gradients are in it; "." none.
        reduced: A character for each rank, where reduced gradients lie apart: as above.
        parameters: A character for each chunk, rank by rank: `NOTHING`, `BEFORE` or `UPDATED`.
    """

    bucket: int
    filled: int
    gradients: str
    reduced: str
    parameters: str


class Holdings:
    """All ranks' buckets, which ops change."""

    def __init__(self, schedule: Schedule, micro_batches: int) -> None:
        """As a step begins: no gradients, and each rank's share of the parameters.

        Args:
            schedule: Of any rank.
            micro_batches: Of a step.
        """
        self.schedule, self.world = schedule, schedule.world_size
        self._buffers = schedule.buffers(micro_batches)
        first = schedule.reduced_buckets
        self.buckets = (*first, *(bucket for bucket in schedule.layout.buckets if bucket not in first))
        self.number = {bucket.name: index for index, bucket in enumerate(self.buckets)}
        self.chunks = schedule.shards if schedule.shards > 1 else self.world
        ranks, sharded = range(self.world), schedule.shards_parameters
        self._gradients = {b.name: [[frozenset[int]()] * self.chunks for _ in ranks] for b in self.buckets}
        self._reduced = {b.name: [frozenset[int]() for _ in ranks] for b in self.buckets}
        self._parameters = {
            b.name: [
                [BEFORE if not sharded or c == self.own(r) else NOTHING for c in range(self.chunks)] for r in ranks
            ]
            for b in self.buckets
        }
        self._filled: dict[str, set[int]] = {bucket.name: set() for bucket in self.buckets}
        self._in_slot: dict[int, str] = {}

    def own(self, rank: int) -> int:
        """Which chunk of a bucket is a rank's shard; 0 where there are none."""
        return rank % self.schedule.shards

    def bucket(self, name: str) -> Bucket:
        """A bucket by its name."""
        return self.buckets[self.number[name]]

    def held(self, name: str) -> Held:
        """One bucket as it is."""
        bucket, done = self.bucket(name), self._filled[name]
        slots = self.schedule.layout.slots
        numel = {slot: slots[slot].spec.numel for slot in bucket.slots}
        whole = sum(numel.values())
        return Held(
            self.number[name],
            100 if done.issuperset(numel) else 100 * sum(numel[slot] for slot in done) // max(1, whole),
            "".join(_count(chunk) for chunks in self._gradients[name] for chunk in chunks),
            "".join(map(_count, self._reduced[name])) if self._buffers.has_reduced else "",
            "".join("".join(chunks) for chunks in self._parameters[name]),
        )

    def summed(self, name: str) -> list[tuple[frozenset[int], ...]]:
        """The ranks whose gradients are in each chunk of a bucket, and in what lies apart, on each rank."""
        apart = [(each,) if self._buffers.has_reduced else () for each in self._reduced[name]]
        return [(*chunks, *more) for chunks, more in zip(self._gradients[name], apart, strict=True)]

    # ---- what ops change: each says which buckets

    def copy_in(self, unit: str) -> list[str]:
        """Every rank's gradients of a unit come into its buckets."""
        touched = []
        for bucket in (b for b in self.schedule.buckets_of.get(unit, ()) if b.trainable):
            mine = {slot for slot in bucket.slots if self.schedule.layout.slots[slot].spec.unit == unit}
            self._filled[bucket.name] |= mine
            if self._filled[bucket.name].issuperset(bucket.slots):
                for rank in range(self.world):
                    self._gradients[bucket.name][rank] = [frozenset((rank,))] * self.chunks
            touched.append(bucket.name)
        return touched

    def add(self, name: str, group: list[int], rounds: list[Round]) -> list[str]:
        """One round of a reduction of a bucket's gradients within a group, of which each rank's part is given."""
        before = [list(self._gradients[name][rank]) for rank in group]
        for place, (rank, round_) in enumerate(zip(group, rounds, strict=True)):
            after = list(before[place])
            for transfer in round_.receives:
                for chunk in range(transfer.start, transfer.stop):
                    came = before[transfer.peer][chunk]
                    after[chunk] = after[chunk] | came if round_.combine == "add" else came
            self._gradients[name][rank] = after
        return [name]

    def keep_sums(self, name: str) -> list[str]:
        """A reduction is over: a rank that has a shard has its sums, and the rest of the bucket means nothing.

        Sums may lie apart from the bucket, which then means nothing at all.
        """
        if self.schedule.shards == 1 and not self._buffers.has_reduced:
            return []
        for rank in range(self.world):
            own = self._gradients[name][rank][self.own(rank)]
            self._gradients[name][rank] = [frozenset()] * self.chunks
            if self._buffers.has_reduced:
                self._reduced[name][rank] = own
            else:
                self._gradients[name][rank][self.own(rank)] = own
        self._filled[name].clear()
        return [name]

    def keep_on_server(self, name: str) -> list[str]:
        """A reduce is over: rank 0 has the sums, and the others' gradients mean nothing."""
        for rank in range(1, self.world):
            self._gradients[name][rank] = [frozenset()] * self.chunks
        return [name]

    def add_replicas(self, name: str, groups: list[list[int]]) -> list[str]:
        """Replicas have added their shards up."""
        for group in groups:
            summed = frozenset[int]().union(*(self._reduced[name][rank] for rank in group))
            for rank in group:
                self._reduced[name][rank] = summed
        return [name]

    def make_room(self, name: str) -> list[str]:
        """A unit is about to be gathered into a slot: what lies there is gone."""
        (unit,) = self.bucket(name).units if len(self.bucket(name).units) == 1 else ("",)
        slot = self.schedule.slot.get(unit)
        before = None if slot is None else self._in_slot.get(slot)
        if slot is None or before == unit:
            return []
        self._in_slot[slot] = unit
        gone = [bucket.name for bucket in self.schedule.gathered_buckets.get(before or "", ())]
        for other in gone:
            self._reshard(other)
        return gone

    def spread(self, name: str, group: list[int], rounds: list[Round]) -> list[str]:
        """One round in which parameters go from ranks of a group to others."""
        before = [list(self._parameters[name][rank]) for rank in group]
        for rank, round_ in zip(group, rounds, strict=True):
            for transfer in round_.receives:
                for chunk in range(transfer.start, transfer.stop):
                    self._parameters[name][rank][chunk] = before[transfer.peer][chunk]
        return [name]

    def update(self) -> list[str]:
        """Each rank has updated its share, of which no gradients are needed any more."""
        updated = [bucket.name for bucket in self.schedule.reduced_buckets]
        for name in updated:
            if self.schedule.shards_parameters:
                self._reshard(name)
            for rank in range(1 if isinstance(self.schedule, ParameterServer) else self.world):
                for chunk in range(self.chunks) if self.schedule.shards == 1 else (self.own(rank),):
                    self._parameters[name][rank][chunk] = UPDATED
            self._gradients[name] = [[frozenset[int]()] * self.chunks for _ in range(self.world)]
            self._reduced[name] = [frozenset[int]() for _ in range(self.world)]
            self._filled[name].clear()
        return updated

    def all_updated(self) -> list[str]:
        """Every rank has written its shard to the memory that they share."""
        trained = [bucket.name for bucket in self.schedule.reduced_buckets]
        for name in trained:
            self._parameters[name] = [[UPDATED] * self.chunks for _ in range(self.world)]
        return trained

    def _reshard(self, name: str) -> None:
        """Leaves each rank with its shard alone of a bucket's parameters."""
        for rank, chunks in enumerate(self._parameters[name]):
            chunks[:] = [held if chunk == self.own(rank) else NOTHING for chunk, held in enumerate(chunks)]


def _count(ranks: frozenset[int]) -> str:
    return _DIGITS[len(ranks)] if ranks else NOTHING
