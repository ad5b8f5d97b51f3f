"""Which ranks share what, and which places units and buckets take on one of them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from paceline.layout import Bucket, Layout
from paceline.strategy import Strategy

DEPTH = 2
"""Units whose sharded parameters or gradients are held whole at a time: one computes, one is on its way."""


@dataclass(frozen=True)
class Placement:
    """What a strategy means for one model, on one rank.

    Attributes:
        layout: Units and buckets.
        strategy: What is sharded, and what is synchronised when.
        world_size: Number of ranks. With one rank nothing is communicated.
        rank: Whose.
        order: Units whose module runs, in the order of the forward pass. A unit that is not in it (parameters
            held directly by a container) has no compute op of its own.
        late: Units whose gradients may still change after their backward op (seen by the engine, for example
            parameters used in two reentrant checkpoints); they are collected after the whole backward.
    """

    layout: Layout
    strategy: Strategy
    world_size: int
    rank: int
    order: tuple[str, ...]
    late: frozenset[str] = field(default=frozenset())

    # ---- who shares what

    @cached_property
    def shards(self) -> int:
        """Ranks that hold one copy between them; 1 where nothing is sharded."""
        return self.strategy.shards(self.world_size)

    @property
    def replicas(self) -> int:
        """Copies of the model, whole or sharded."""
        return self.world_size // self.shards

    @cached_property
    def gathers_units(self) -> bool:
        """Whether parameters are sharded, hence gathered for each unit's computing."""
        return self.strategy.gathers and self.shards > 1

    @property
    def lets_go(self) -> bool:
        """Whether a gathered unit's parameters may be overwritten between its forward and its backward."""
        return self.gathers_units and self.strategy.accumulation != "hold"

    @cached_property
    def collects(self) -> bool:
        """Whether gradients are moved into buckets: to be communicated, or held in another precision."""
        return self.world_size > 1 or self.strategy.low

    @property
    def serves(self) -> bool:
        """See `Strategy.serves`."""
        return self.strategy.serves(self.world_size)

    @property
    def gathers_after_update(self) -> bool:
        """Whether every rank keeps whole parameters, but updates a shard."""
        return self.shards > 1 and self.strategy.stage in (1, 2) and not self.shares

    @cached_property
    def shares(self) -> bool:
        """Whether ranks keep one copy of the parameters between them, each updating its shard of it."""
        return self.shards > 1 and self.strategy.share_parameters

    # ---- parameters

    @cached_property
    def residents(self) -> tuple[Bucket, ...]:
        """Buckets that are gathered once a step: resident ones, and those of units whose module never runs."""
        ran = set(self.order)
        return tuple(
            bucket
            for bucket in self.layout.buckets
            if self.gathers_units and (bucket.resident or ran.isdisjoint(bucket.units))
        )

    @cached_property
    def depth(self) -> int:
        """Number of places for gathered units."""
        return max(1, len(self.gathered)) if self.strategy.accumulation == "hold" else DEPTH

    @cached_property
    def gathered(self) -> tuple[str, ...]:
        """Units that are gathered for computing and then let go, in the order of the forward pass."""
        if not self.gathers_units:
            return ()
        kept = set(self.residents)
        return tuple(unit for unit in self.order if not kept.issuperset(self.buckets_of.get(unit, ())))

    @cached_property
    def moving(self) -> Mapping[str, tuple[Bucket, ...]]:
        """The buckets of each gathered unit that are gathered and let go with it."""
        kept = set(self.residents)
        return {unit: tuple(b for b in self.buckets_of[unit] if b not in kept) for unit in self.gathered}

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Which of the `depth` places a gathered unit's parameters take, the same in forward and backward."""
        return {unit: index % self.depth for index, unit in enumerate(self.gathered)}

    @cached_property
    def buckets_of(self) -> Mapping[str, tuple[Bucket, ...]]:
        """The buckets that hold a unit's parameters, by unit."""
        found: dict[str, tuple[Bucket, ...]] = {}
        for bucket in self.layout.buckets:
            for unit in bucket.units:
                found[unit] = (*found.get(unit, ()), bucket)
        return found

    def held(self, units: Iterable[str]) -> dict[int, str]:
        """The places that some gathered units take, with who takes them."""
        return {self.place[unit]: unit for unit in units}

    # ---- gradients

    @cached_property
    def reduced(self) -> tuple[Bucket, ...]:
        """Buckets of gradients in the order in which backward completes them."""
        last = {unit: index for index, unit in enumerate(self.collected)}
        trainable = (bucket for bucket in self.layout.buckets if bucket.trainable)
        return tuple(sorted(trainable, key=lambda bucket: max(last[unit] for unit in bucket.units)))

    @cached_property
    def collected(self) -> tuple[str, ...]:
        """Units with trainable parameters, in the order in which their gradients are collected."""
        trained = {unit for bucket in self.layout.buckets if bucket.trainable for unit in bucket.units}
        return tuple(unit for unit in (*reversed(self.on_time), *self.at_end) if unit in trained)

    @cached_property
    def rotates(self) -> bool:
        """Whether whole gradients live only from their collection to their reduction."""
        return self.strategy.stage >= 2 and self.shards > 1 and self.strategy.reduces_each

    @cached_property
    def on_time(self) -> tuple[str, ...]:
        """Units that are collected as soon as their backward is over, in the order of the forward pass."""
        return tuple(u for u in self.order if u not in self.late and self.strategy.synchronize == "overlap")

    @cached_property
    def at_end(self) -> tuple[str, ...]:
        """Units that are collected after the whole backward, in the order in which they are."""
        early = set(self.on_time)
        return tuple(unit for unit in reversed(self.layout.units) if unit not in early)

    @cached_property
    def gradient_place(self) -> Mapping[str, int]:
        """Which place a bucket's whole gradients take where these rotate: `DEPTH` places in turn.

        There are more only where units of different buckets run in between each other.
        """
        places: dict[str, int] = {}
        free: deque[int] = deque()
        opened = 0
        collected: set[str] = set()
        for unit in self.collected:
            mine = [bucket for bucket in self.buckets_of.get(unit, ()) if bucket.trainable]
            for name in (bucket.name for bucket in mine if bucket.name not in places):
                if opened < DEPTH or not free:
                    places[name] = opened
                    opened += 1
                else:
                    places[name] = free.popleft()
            collected.add(unit)
            free.extend(places[bucket.name] for bucket in mine if collected.issuperset(bucket.units))
        return places

    def collected_in(self, bucket: Bucket) -> int | str:
        """Where a bucket's whole gradients lie: a place that others take too, or its own."""
        return self.gradient_place[bucket.name] if self.rotates else bucket.name
