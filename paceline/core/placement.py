"""The meaning of a strategy for one model on one rank: groups, and the slots of units and buckets. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from paceline.core.layout import ROOT, Bucket, Layout
from paceline.core.mesh import REPLICATE, SHARD, Mesh
from paceline.core.ops import Group, Stream
from paceline.core.strategy import Strategy

DEPTH = 2
"""Units whose sharded gradients are held whole at a time: one is copied in, one is reduced."""


@dataclass(frozen=True)
class Placement:
    """The groups of ranks, the slots and the order of buckets that a strategy gives one model, on one rank.

    Attributes:
        layout: Units and buckets.
        strategy: What is sharded, and what is synchronised when.
        world_size: Number of ranks. With one rank nothing is communicated.
        rank: This rank.
        order: Units whose module runs, in the order of the forward pass. A unit that is not in it (parameters
            held directly by a container) has no compute op of its own; where it is empty, the model computes as `ROOT`.
        deferred: Units whose gradients are not complete when the backward of the unit before them begins (seen by
            the engine: parameters used in two reentrant checkpoints, or outside their unit too); they are copied in
            after the whole backward.
    """

    layout: Layout
    strategy: Strategy
    world_size: int
    rank: int
    order: tuple[str, ...]
    deferred: frozenset[str] = field(default=frozenset())

    # ---- ranks

    @cached_property
    def mesh(self) -> Mesh:
        """All ranks: shard groups, which are replicas of each other."""
        shards = self.strategy.shards(self.world_size)
        return Mesh(((REPLICATE, self.world_size // shards), (SHARD, shards)))

    @cached_property
    def shards(self) -> int:
        """Ranks of a shard group; 1 where nothing is sharded."""
        return self.mesh.extent(SHARD)

    @cached_property
    def replicas(self) -> int:
        """Copies of the model, whole or sharded."""
        return self.mesh.extent(REPLICATE)

    @property
    def holders(self) -> int:
        """Ranks that hold each element of the reduced gradients, and update it."""
        return self.replicas

    @property
    def has_followers(self) -> bool:
        """Whether some ranks keep whole parameters that only others update."""
        return self.holders < self.replicas

    @cached_property
    def shard_index(self) -> int:
        """The index of this rank's shards."""
        return self.mesh.coordinates(self.rank)[SHARD]

    @cached_property
    def groups(self) -> Mapping[Stream, Group]:
        """The group of ranks that each stream's collectives run over; only streams that there are."""
        if self.world_size == 1:
            return {}
        found: dict[Stream, Group] = {"statistics": "world", "reduce": "shard" if self.shards > 1 else "world"}
        if self.shards > 1:
            found["gather"] = "shard"
        if 1 < self.shards < self.world_size:
            found["replicate"] = "replicate"
        return found

    def ranks_of(self, group: Group) -> list[list[int]]:
        """All groups of one kind, as lists of ranks."""
        along = {"world": self.mesh.names, "shard": (SHARD,), "replicate": (REPLICATE,)}
        return self.mesh.groups(along[group])

    def position_in(self, group: Group) -> tuple[int, int]:
        """This rank's index in its group of one kind, and the number of ranks in it."""
        if group == "shard":
            return self.shard_index, self.shards
        if group == "replicate":
            return self.mesh.coordinates(self.rank)[REPLICATE], self.replicas
        return self.rank, self.world_size

    # ---- what the stages mean

    @cached_property
    def shards_parameters(self) -> bool:
        """Whether ranks hold shards of the parameters alone, and gather a unit's for its computing."""
        return self.strategy.gathers and self.shards > 1

    @property
    def reshards_after_forward(self) -> bool:
        """Whether a gathered unit's parameters may be overwritten between its forward and its backward."""
        return self.shards_parameters and self.strategy.accumulation != "hold"

    @cached_property
    def copies_gradients(self) -> bool:
        """Whether gradients are copied into buckets: to be communicated, or held in another precision."""
        return self.world_size > 1 or self.strategy.low

    @property
    def replaces_earlier_gradients(self) -> bool:
        """Whether what `p.grad` holds must be made another tensor before autograd adds to it."""
        is_scaled = self.has_followers or self.strategy.gradients == "sum"
        return self.shards > 1 or self.strategy.low or self.strategy.reduces_every_micro_batch or is_scaled

    @property
    def sends_updates_on(self) -> Stream | None:
        """The stream on which ranks get what others have updated; None if there is none."""
        return "gather" if "gather" in self.groups else None

    @property
    def gathers_updates(self) -> bool:
        """Whether every rank keeps whole parameters but updates a shard, so that an update is gathered."""
        return self.shards > 1 and self.strategy.stage in (1, 2) and not self.shares_memory

    @cached_property
    def shares_memory(self) -> bool:
        """Whether ranks compute with one copy of the parameters in shared memory, each updating its shard of it."""
        return self.shards > 1 and self.strategy.share_parameters

    # ---- parameters

    @cached_property
    def kept_buckets(self) -> tuple[Bucket, ...]:
        """Buckets that are gathered once a step and kept: small ones, of no unit, and of units that never run."""
        ran = set(self.order)
        return tuple(
            bucket
            for bucket in self.layout.buckets
            if self.shards_parameters and (bucket.kept or ran.isdisjoint(bucket.units))
        )

    @cached_property
    def computed_units(self) -> tuple[str, ...]:
        """Units that have a forward and a backward of their own: `ROOT` for a model that is cut into none."""
        return self.order or (ROOT,)

    @cached_property
    def unowned_buckets(self) -> tuple[Bucket, ...]:
        """Buckets of units that do not run, such as tied parameters: any unit may compute with them."""
        ran = set(self.computed_units)
        return tuple(bucket for bucket in self.layout.buckets if not ran.issuperset(bucket.units))

    @cached_property
    def slots(self) -> int:
        """Number of slots for gathered units: for the one that computes, and those that come next."""
        most = max(1, len(self.gathered_units))
        return most if self.strategy.accumulation == "hold" else min(most, self.strategy.prefetch + 1)

    @cached_property
    def gathered_units(self) -> tuple[str, ...]:
        """Units that are gathered for computing and then resharded, in the order of the forward pass."""
        if not self.shards_parameters:
            return ()
        kept = set(self.kept_buckets)
        return tuple(unit for unit in self.order if not kept.issuperset(self.buckets_of.get(unit, ())))

    @cached_property
    def gathered_buckets(self) -> Mapping[str, tuple[Bucket, ...]]:
        """The buckets of each gathered unit that are gathered and resharded with it."""
        kept = set(self.kept_buckets)
        return {unit: tuple(b for b in self.buckets_of[unit] if b not in kept) for unit in self.gathered_units}

    @cached_property
    def slot(self) -> Mapping[str, int]:
        """By unit, the slot of the `slots` that its gathered parameters take, the same in forward and backward."""
        return {unit: index % self.slots for index, unit in enumerate(self.gathered_units)}

    @cached_property
    def buckets_of(self) -> Mapping[str, tuple[Bucket, ...]]:
        """The buckets that hold a unit's parameters, by unit."""
        found: dict[str, tuple[Bucket, ...]] = {}
        for bucket in self.layout.buckets:
            for unit in bucket.units:
                found[unit] = (*found.get(unit, ()), bucket)
        return found

    def occupied(self, units: Iterable[str]) -> dict[int, str]:
        """The slots that some gathered units take, with the unit in each."""
        return {self.slot[unit]: unit for unit in units}

    # ---- gradients

    @cached_property
    def reduced_buckets(self) -> tuple[Bucket, ...]:
        """Buckets of gradients in the order in which backward completes them."""
        last = {unit: index for index, unit in enumerate(self.copied_units)}
        trainable = (bucket for bucket in self.layout.buckets if bucket.trainable)
        return tuple(sorted(trainable, key=lambda bucket: max(last[unit] for unit in bucket.units)))

    @property
    def updated_buckets(self) -> tuple[Bucket, ...]:
        """Buckets of which this rank has reduced gradients, and updates its share."""
        return self.reduced_buckets

    @cached_property
    def copied_units(self) -> tuple[str, ...]:
        """Units with trainable parameters, in the order in which their gradients are copied in."""
        trained = {unit for bucket in self.layout.buckets if bucket.trainable for unit in bucket.units}
        return tuple(
            unit for unit in (*reversed(self.copied_in_backward), *self.copied_after_backward) if unit in trained
        )

    @cached_property
    def reuses_gradient_slots(self) -> bool:
        """Whether whole gradients live only from copy-in to reduction, in slots that buckets take in turn."""
        return self.strategy.stage >= 2 and self.shards > 1 and self.strategy.reduces_every_micro_batch

    @cached_property
    def copied_in_backward(self) -> tuple[str, ...]:
        """Units that are copied in as soon as their backward is over, in the order of the forward pass."""
        return tuple(u for u in self.order if u not in self.deferred and self.strategy.synchronize == "overlap")

    @cached_property
    def copied_early(self) -> frozenset[str]:
        """`copied_in_backward`, to look a unit up in."""
        return frozenset(self.copied_in_backward)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """The place of each unit that runs in `order`."""
        return {unit: index for index, unit in enumerate(self.order)}

    @cached_property
    def copied_after_backward(self) -> tuple[str, ...]:
        """Units that are copied in after the whole backward, in the order in which they are."""
        early = set(self.copied_in_backward)
        return tuple(unit for unit in reversed(self.layout.units) if unit not in early)

    @cached_property
    def gradient_slot(self) -> Mapping[str, int]:
        """By bucket, the slot that its whole gradients take where these are reused: `DEPTH` slots in turn.

        There are more only where units of different buckets run in between each other.
        """
        slots: dict[str, int] = {}
        free: deque[int] = deque()
        opened = 0
        copied: set[str] = set()
        for unit in self.copied_units:
            mine = [bucket for bucket in self.buckets_of.get(unit, ()) if bucket.trainable]
            for name in (bucket.name for bucket in mine if bucket.name not in slots):
                if opened < DEPTH or not free:
                    slots[name] = opened
                    opened += 1
                else:
                    slots[name] = free.popleft()
            copied.add(unit)
            free.extend(slots[bucket.name] for bucket in mine if copied.issuperset(bucket.units))
        return slots

    def copied_to(self, bucket: Bucket) -> int | str:
        """Where a bucket's whole gradients lie: a slot that others take too, or its own place."""
        return self.gradient_slot[bucket.name] if self.reuses_gradient_slots else bucket.name
