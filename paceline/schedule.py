"""One optimizer step as a list of operations.

Pure: from a `Layout` and a `Strategy` follows what is computed, what is sent, in which order on which stream,
and after what. The engine reads this list to decide what to launch when; a simulation or a report reads the
same list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from paceline.comm.algorithms import traffic
from paceline.layout import Bucket
from paceline.ops import COUNTS, PREVIOUS, READ, WRITTEN, Key, Kind, Op, Phase, Stream
from paceline.placement import Placement


@dataclass(frozen=True)
class Schedule(Placement):
    """The ops of one rank's optimizer step; with a parameter server, ranks differ in what they send.

    Attributes:
        counts: How many fp64 numbers the ranks agree on in each synchronised micro-batch.
    """

    counts: int = 0
    _passes: dict[tuple[str, int, bool], tuple[Op, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def step(self, micro_batches: int) -> tuple[Op, ...]:
        """All ops of a step of `micro_batches` micro-batches, of which the last synchronises.

        None starts before the update of the step before is over; what follows that update may still be under way.
        """
        ops: list[Op] = []
        for index in range(micro_batches):
            ops += self.micro_batch(index, synchronise=index == micro_batches - 1)
        return (*ops, *self.update(micro_batches - 1))

    def micro_batch(self, index: int, synchronise: bool) -> tuple[Op, ...]:
        """Forward and backward of one micro-batch, with its collectives."""
        return (*self.forward(index), *self.backward(index, synchronise))

    def forward(self, index: int) -> tuple[Op, ...]:
        """The forward half of a micro-batch."""
        return self._remembered("forward", index, False)

    def backward(self, index: int, synchronise: bool) -> tuple[Op, ...]:
        """The backward half of a micro-batch; where it synchronises, the step's gradients are complete after it."""
        return self._remembered("backward", index, synchronise)

    def _remembered(self, phase: str, index: int, synchronise: bool) -> tuple[Op, ...]:
        # The engine asks in every step, and a large model has hundreds of buckets.
        key = (phase, index, synchronise)
        if key not in self._passes:
            ops = self._forward(index) if phase == "forward" else self._backward(index, synchronise)
            self._passes[key] = tuple(ops)
        return self._passes[key]

    def _forward(self, index: int) -> list[Op]:
        ops: list[Op] = []
        if self.gathers_units and index == 0:
            ops += [self.gather(bucket, 0, "forward") for bucket in self.residents]
        needed: dict[str, tuple[Key, ...]] = {}
        first = tuple(op.key for op in ops)
        if (self.gathers_after_update or self.serves or self.shares) and index == 0:
            needed, first = self.sent_before
        held = {} if index == 0 else self.held(self.gathered[: self.depth])
        walk = _Walk(self, "forward", index, self.order, held)
        for unit in self.order:
            ops += walk.ahead()
            after = dict.fromkeys((*walk.needs(unit), *needed.get(unit, ()), *first))
            ops.append(Op("forward", unit, index, "forward", "compute", tuple(after)))
            walk.ran(unit)
            first = ()
        return ops

    def _backward(self, index: int, synchronise: bool) -> list[Op]:
        ops: list[Op] = []
        communicates = self.world_size > 1 and (synchronise or self.strategy.reduces_each)
        reduces = list(self.reduced) if communicates else []
        collected: set[str] = set()
        # What must be reduced before gradients are collected where it lies.
        lent: dict[int | str, Key] = {}
        if index > 0 and self.world_size > 1 and self.strategy.reduces_each:
            lent = {self.collected_in(b): self.reduce(b, index - 1, False)[0].key for b in self.reduced}

        def collect(unit: str) -> None:
            mine = [bucket for bucket in self.buckets_of.get(unit, ()) if bucket.trainable]
            if not self.collects or not mine:
                return
            waits = tuple(lent[place] for place in dict.fromkeys(map(self.collected_in, mine)) if place in lent)
            ops.append(Op("collect", unit, index, "backward", "compute", waits))
            collected.add(unit)
            while reduces and collected.issuperset(reduces[0].units):
                bucket = reduces.pop(0)
                reduction = self.reduce(bucket, index, synchronise)
                ops.extend(reduction)
                lent[self.collected_in(bucket)] = reduction[0].key

        walk = _Walk(self, "backward", index, self.order[::-1], self.held(self.gathered[-self.depth :]))
        for unit in reversed(self.order):
            ops += walk.ahead()
            ops.append(Op("backward", unit, index, "backward", "compute", walk.needs(unit)))
            walk.ran(unit)
            if unit in self.on_time:
                collect(unit)
        for unit in self.at_end:
            collect(unit)
        if synchronise and self.world_size > 1:
            # What ranks agree on includes the norm, which each knows of its shard once that is reduced.
            after = tuple(op.key for op in ops if op.stream in ("reduce", "replicate")) if self.shards > 1 else ()
            ops.append(Op("measure", COUNTS, index, "backward", "compute", after))
            after = (ops[-1].key,)
            ops.append(self._communicate("all_reduce", COUNTS, index, "backward", "counts", after, self.counts, 8))
        return ops

    def update(self, micro_batch: int) -> tuple[Op, ...]:
        """The optimizer's update after the synchronised micro-batch, and what follows it."""
        after: tuple[Key, ...] = ()
        if self.world_size > 1:
            after = tuple(self.reduce(bucket, micro_batch)[-1].key for bucket in self.reduced)
            after += (Key("all_reduce", COUNTS, micro_batch, "backward"),)
        ops: list[Op] = []
        if self.shares:
            ops.append(self._communicate("barrier", READ, micro_batch, "update", "gather", after, 1, 8))
            after = (ops[0].key,)
        ops.append(Op("update", "optimizer", micro_batch, "update", "compute", after))
        updated = (ops[-1].key,)
        if self.serves:
            ops += [
                self._communicate("broadcast", b.name, micro_batch, "update", "reduce", updated, b.numel, b.itemsize)
                for b in self.reduced
            ]
        if self.gathers_after_update:
            # The next forward needs the first units first.
            ops += [self.gather(bucket, micro_batch, "update", updated) for bucket in reversed(self.reduced)]
        if self.shares:
            ops.append(self._communicate("barrier", WRITTEN, micro_batch, "update", "gather", updated, 1, 8))
        return tuple(ops)

    def gather(self, bucket: Bucket, index: int, phase: Phase, after: tuple[Key, ...] = ()) -> Op:
        """The op that gathers one bucket's parameters from their shards."""
        return self._communicate(
            "all_gather", bucket.name, index, phase, "gather", after, bucket.numel, bucket.itemsize
        )

    def reduce(self, bucket: Bucket, index: int, synchronise: bool = True) -> tuple[Op, ...]:
        """The ops that reduce one bucket's gradients in micro-batch `index`, each after the one before.

        Replicas of a shard are reduced only where the micro-batch synchronises.
        """
        after = tuple(Key("collect", unit, index, "backward") for unit in bucket.units)
        first: Kind = "reduce" if self.serves else "reduce_scatter" if self.shards > 1 else "all_reduce"
        item = bucket.gradient_itemsize
        ops = [self._communicate(first, bucket.name, index, "backward", "reduce", after, bucket.numel, item)]
        if synchronise and 1 < self.shards < self.world_size:
            numel = bucket.numel // self.shards
            item = self.layout.flats[bucket.flat].master_itemsize if self.strategy.reduces_each and index else item
            ops.append(
                self._communicate("all_reduce", bucket.name, index, "backward", "replicate", (ops[0].key,), numel, item)
            )
        return tuple(ops)

    @cached_property
    def sent_before(self) -> tuple[dict[str, tuple[Key, ...]], tuple[Key, ...]]:
        """What the step before sends after its update: ops that units wait for, and those that the first waits for."""
        ran = set(self.order)
        needed: dict[str, tuple[Key, ...]] = {}
        first: tuple[Key, ...] = ()
        if self.shares:
            return needed, (Key("barrier", WRITTEN, PREVIOUS, "update"),)
        for bucket in self.reduced:
            key = Key("broadcast" if self.serves else "all_gather", bucket.name, PREVIOUS, "update")
            for unit in bucket.units:
                if unit in ran:
                    needed[unit] = (*needed.get(unit, ()), key)
                else:
                    first = (*first, key)
        return needed, first

    def _communicate(
        self,
        kind: Kind,
        target: str,
        micro_batch: int,
        phase: Phase,
        stream: Stream,
        after: tuple[Key, ...],
        numel: int,
        itemsize: int,
    ) -> Op:
        index, size = self.rank, self.world_size
        if stream == "gather" or kind == "reduce_scatter":
            index, size = self.rank % self.shards, self.shards
        elif stream == "replicate":
            index, size = self.rank // self.shards, self.replicas
        sent, received = traffic(kind, index, size, numel)
        return Op(
            kind, target, micro_batch, phase, stream, after, numel * itemsize, sent * itemsize, received * itemsize
        )


class _Walk:
    """One pass over the units whose parameters are gathered: each as early as its place is free."""

    def __init__(
        self, schedule: Schedule, phase: Phase, index: int, order: Sequence[str], held: Mapping[int, str]
    ) -> None:
        self._schedule, self._phase, self._index = schedule, phase, index
        self._held = dict(held)
        self._coming = deque(unit for unit in order if unit in schedule.place)
        self._waiting = set(self._coming)
        self._ran: set[str] = set()
        self._arrived: dict[str, tuple[Key, ...]] = {}

    def ahead(self) -> list[Op]:
        """Gathers of the units that come next, as far as there are free places."""
        ops: list[Op] = []
        while self._coming:
            unit = self._coming[0]
            place = self._schedule.place[unit]
            before = self._held.get(place)
            if before != unit and before in self._waiting:
                break
            self._coming.popleft()
            if before == unit:
                continue
            after = (Key(self._phase, before, self._index, self._phase),) if before in self._ran else ()
            gathers = [
                self._schedule.gather(bucket, self._index, self._phase, after) for bucket in self._schedule.moving[unit]
            ]
            self._held[place] = unit
            self._arrived[unit] = tuple(op.key for op in gathers)
            ops += gathers
        return ops

    def needs(self, unit: str) -> tuple[Key, ...]:
        """The gathers that bring a unit's parameters in this pass."""
        return self._arrived.get(unit, ())

    def ran(self, unit: str) -> None:
        """A unit has been computed: its place is free."""
        self._waiting.discard(unit)
        self._ran.add(unit)
