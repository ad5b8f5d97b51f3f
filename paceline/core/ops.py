"""The vocabulary of a schedule: what an operation is, what it reads and writes, and how it is named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "unshard",
    "reshard",
    "copy_in",
    "statistics",
    "widen",
    "publish",
    "update",
    "cast",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "reduce",
    "broadcast",
    "barrier",
]
Phase = Literal["forward", "backward", "update"]
Stream = Literal["compute", "gather", "reduce", "replicate", "statistics"]
Group = Literal["", "world", "shard", "replicate"]

STREAMS: tuple[Stream, ...] = ("compute", "gather", "reduce", "replicate", "statistics")

COMPUTE: frozenset[str] = frozenset(
    {"forward", "backward", "unshard", "reshard", "copy_in", "statistics", "widen", "publish", "update", "cast"}
)
"""Kinds of op that run where the model computes; the others communicate."""

READ = "parameters read"
"""Target of the barrier behind which every rank has done with the parameters that ranks share."""

WRITTEN = "parameters written"
"""Target of the barrier behind which every rank has updated its shard of them."""

STATISTICS = "statistics"
"""Target of the small all-reduce that sums what ranks must agree on (see `executor.statistics`)."""

BUFFERS = "the model's buffers"
"""Target of what sends rank 0's buffers that forwards change, as bytes."""

GRADIENT_NORM = "pl.clip_grad_norm_"
"""Target of the sum of squares whose root it is."""

GRADIENTS = "gradients"
"""Target of the ops that make reduced gradients the parameters' `grad`."""

OPTIMIZER = "optimizer"
"""Target of the update."""

PREVIOUS = -1
"""As a micro-batch: the last one of the step before."""

EXTRA = -2
"""As a micro-batch: a pass that is no part of a step, such as one for evaluation or logging."""


class Key(NamedTuple):
    """Names one op within a step."""

    kind: str
    target: str
    micro_batch: int
    phase: str


class Span(NamedTuple):
    """Elements [start, stop) of a buffer: what an op reads or writes."""

    buffer: str
    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        """Whether both name some element of one buffer."""
        return self.buffer == other.buffer and max(self.start, other.start) < min(self.stop, other.stop)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one rank within a step, as `pl.engine_of(model).schedule.step(1)` lists them.

    Attributes:
        kind: What it does: forward, backward and update compute, all_gather and its like communicate. unshard lets a
            unit compute with what was gathered, reshard ends that, copy_in moves a unit's gradients into its buckets,
            statistics puts together what ranks agree on, widen copies reduced gradients to the dtype that is updated,
            publish hands them to the parameters, cast rounds updated masters to what is computed with.
        target: Unit, bucket, "statistics", "gradients", "optimizer", or for a barrier what all ranks have done before
            it.
        micro_batch: Number within the step, from 0; -1 is the last one of the step before, -2 a pass that is no part
            of a step.
        phase: Part of the step that it belongs to.
        stream: Ops on one stream run one after another, in the order of the schedule.
        after: Ops that must be complete before this one starts, besides those before it on its stream.
        bytes: Size of the buffer that is communicated.
        sent: Bytes this rank sends, before `Strategy.wire` makes fewer of them.
        received: Bytes this rank receives.
        group: Ranks that a collective runs over, as a group of the schedule's mesh.
        reads: Parts of buffers that it reads.
        writes: Parts of buffers that it writes.
        planned: Whether it is part of every such step, or was added as this step's data asked for it.
        key: This op's name within its step.
    """

    kind: Kind
    target: str
    micro_batch: int
    phase: Phase
    stream: Stream
    after: tuple[Key, ...] = ()
    bytes: int = 0
    sent: int = 0
    received: int = 0
    group: Group = ""
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    planned: bool = True
    key: Key = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Makes the key, by which executors look ops up all the time."""
        object.__setattr__(self, "key", Key(self.kind, self.target, self.micro_batch, self.phase))
