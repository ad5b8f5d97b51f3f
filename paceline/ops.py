"""The vocabulary of a schedule: what an operation is and how it is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "collect",
    "measure",
    "update",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "reduce",
    "broadcast",
    "barrier",
]
Phase = Literal["forward", "backward", "update"]
Stream = Literal["compute", "gather", "reduce", "replicate", "counts"]

STREAMS: tuple[Stream, ...] = ("compute", "gather", "reduce", "replicate", "counts")

COMPUTE: frozenset[str] = frozenset({"forward", "backward", "collect", "measure", "update"})
"""Kinds of op that compute; the others communicate."""

READ = "read"
"""Target of the barrier behind which every rank has done with the parameters that ranks share."""

WRITTEN = "written"
"""Target of the barrier behind which every rank has updated its shard of them."""

COUNTS = "counts"
"""Target of the small all-reduce that sums what ranks must agree on (see `engine.counts`)."""

PREVIOUS = -1
"""As a micro-batch: the last one of the step before."""


class Key(NamedTuple):
    """Names one op within a step."""

    kind: str
    target: str
    micro_batch: int
    phase: str


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one rank within a step."""

    kind: Kind
    target: str
    """Unit, bucket, "counts", "optimizer", or for a barrier what all have done before it. collect moves a unit's
    gradients into its bucket, measure puts together what the ranks agree on."""
    micro_batch: int
    phase: Phase
    """Part of the step that it belongs to."""
    stream: Stream
    """Ops on one stream run one after another, in the order of the schedule."""
    after: tuple[Key, ...] = ()
    """Ops that must be complete before this one starts, besides those before it on its stream."""
    bytes: int = 0
    """Size of the buffer that is communicated."""
    sent: int = 0
    """Bytes this rank sends, before `Strategy.wire` makes fewer of them."""
    received: int = 0
    """Bytes this rank receives."""

    @property
    def key(self) -> Key:
        """This op's name within its step."""
        return Key(self.kind, self.target, self.micro_batch, self.phase)
