"""One optimizer step as a list of operations.

Pure: from a `Layout` and a `Strategy` follows what is computed, what is sent, in which order on which stream,
and after what. The engine reads this list to decide what to launch when; a simulation or a report reads the
same list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from paceline.comm.plan import traffic
from paceline.layout import Bucket, Layout
from paceline.strategy import Strategy

Kind = Literal["forward", "backward", "all_reduce", "reduce", "broadcast", "update"]
Stream = Literal["compute", "reduce", "counts"]

COMPUTE: frozenset[str] = frozenset({"forward", "backward", "update"})
"""Kinds of op that compute; the others communicate."""

COUNTS = "counts"
"""Target of the small all-reduce that sums what ranks must agree on (see `engine.counts`)."""


class Key(NamedTuple):
    """Names one op within a step."""

    kind: str
    target: str
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one rank within a step."""

    kind: Kind
    target: str
    """Unit, bucket, or "counts" / "optimizer"."""
    micro_batch: int
    stream: Stream
    """Ops on one stream run one after another, in the order of the schedule."""
    after: tuple[Key, ...] = ()
    """Ops that must be complete before this one starts, besides those before it on its stream."""
    bytes: int = 0
    """Size of the buffer that is communicated."""
    sent: int = 0
    """Bytes this rank sends."""
    received: int = 0
    """Bytes this rank receives."""

    @property
    def key(self) -> Key:
        """This op's name within its step."""
        return Key(self.kind, self.target, self.micro_batch)


@dataclass(frozen=True)
class Schedule:
    """The ops of one rank's optimizer step.

    Attributes:
        layout: Units and buckets.
        strategy: What is synchronised when.
        world_size: Number of ranks. With one rank nothing is communicated.
        rank: Whose ops: with a parameter server, ranks differ in what they send.
        order: Units whose module runs, in the order of the forward pass. A unit that is not in it (parameters
            held directly by a container) has no compute op of its own.
        late: Units whose gradients may still change after their backward op (seen by the engine, for example
            parameters used in two reentrant checkpoints); their buckets are reduced after the whole backward.
        counts: How many fp64 numbers the ranks agree on in each synchronised micro-batch.
    """

    layout: Layout
    strategy: Strategy
    world_size: int
    rank: int
    order: tuple[str, ...]
    late: frozenset[str] = field(default=frozenset())
    counts: int = 0
    _backwards: dict[tuple[int, bool], tuple[Op, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def step(self, micro_batches: int) -> tuple[Op, ...]:
        """All ops of a step of `micro_batches` micro-batches, of which the last synchronises."""
        ops: list[Op] = []
        for index in range(micro_batches):
            ops += self.micro_batch(index, synchronise=index == micro_batches - 1)
        return (*ops, *self.update(micro_batches - 1))

    def micro_batch(self, index: int, synchronise: bool) -> tuple[Op, ...]:
        """Forward and backward of one micro-batch, with its collectives where it synchronises."""
        return (*self.forward(index), *self.backward(index, synchronise))

    def forward(self, index: int) -> tuple[Op, ...]:
        """The forward half of a micro-batch."""
        return tuple(Op("forward", unit, index, "compute") for unit in self.order)

    def backward(self, index: int, synchronise: bool) -> tuple[Op, ...]:
        """The backward half of a micro-batch, with its collectives where it synchronises."""
        # The engine asks in every step, and a large model has hundreds of buckets.
        if (index, synchronise) not in self._backwards:
            self._backwards[index, synchronise] = self._backward(index, synchronise)
        return self._backwards[index, synchronise]

    def _backward(self, index: int, synchronise: bool) -> tuple[Op, ...]:
        ops: list[Op] = []
        reduces = list(self.layout.buckets) if synchronise and self.world_size > 1 else []
        done: set[str] = set()
        for unit in reversed(self.order):
            ops.append(Op("backward", unit, index, "compute"))
            done.add(unit)
            while reduces and done.issuperset(self._waits_for(reduces[0])):
                ops.append(self.reduce(reduces.pop(0), index))
        ops += [self.reduce(bucket, index) for bucket in reduces]
        if synchronise and self.world_size > 1:
            after = tuple(Key("backward", unit, index) for unit in reversed(self.order))
            ops.append(self._communicate("all_reduce", COUNTS, index, "counts", after, self.counts, 8))
        return tuple(ops)

    def update(self, micro_batch: int) -> tuple[Op, ...]:
        """The optimizer's update after the synchronised micro-batch, and what follows it."""
        reduces: tuple[Key, ...] = ()
        if self.world_size > 1:
            reduces = tuple(self.reduce(bucket, micro_batch).key for bucket in self.layout.buckets)
            reduces += (Key("all_reduce", COUNTS, micro_batch),)
        ops = [Op("update", "optimizer", micro_batch, "compute", reduces)]
        if self.world_size > 1 and self.strategy.collective == "parameter_server":
            ops += [
                self._communicate("broadcast", b.name, micro_batch, "reduce", (ops[0].key,), b.numel, b.itemsize)
                for b in self.layout.buckets
            ]
        return tuple(ops)

    def _waits_for(self, bucket: Bucket) -> Sequence[str]:
        """Units that must have gone backward before a bucket is reduced."""
        ran = set(self.order)
        if self.strategy.synchronize == "after" or any(u in self.late or u not in ran for u in bucket.units):
            return self.order
        return bucket.units

    def reduce(self, bucket: Bucket, index: int) -> Op:
        """The op that reduces one bucket's gradients in micro-batch `index`."""
        kind: Kind = "reduce" if self.strategy.collective == "parameter_server" else "all_reduce"
        after = tuple(Key("backward", unit, index) for unit in self._waits_for(bucket))
        return self._communicate(kind, bucket.name, index, "reduce", after, bucket.numel, bucket.itemsize)

    def _communicate(
        self,
        kind: Kind,
        target: str,
        micro_batch: int,
        stream: Stream,
        after: tuple[Key, ...],
        numel: int,
        itemsize: int,
    ) -> Op:
        sent, received = traffic(kind, self.rank, self.world_size, numel)
        return Op(kind, target, micro_batch, stream, after, numel * itemsize, sent * itemsize, received * itemsize)
