"""The result of a check: its faults, or how much was proved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.core.buffers import Buffer
from paceline.core.memory import Memory
from paceline.core.ops import EXTRA, PREVIOUS, Key, Op


@dataclass(frozen=True)
class Fault:
    """One thing that would go wrong."""

    kind: str
    """sequence, deadlock, size, race, contents or gradients."""
    rank: int
    op: Key | None
    """The op at which it shows; None where it shows at none."""
    message: str
    """Names rank, ops, bucket and buffer, and says what would happen."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


class ScheduleError(Exception):
    """A schedule that would hang, race, or compute something else than its strategy says: a mistake in paceline."""


@dataclass(frozen=True)
class BufferUse:
    """A row of a rank's table of buffers, with what uses it in a step.

    Attributes:
        name: Of the buffer.
        kind: What it is for: see `core.buffers.BufferKind`.
        dtype: Name of its dtype.
        bytes: Its size.
        peers: The stream on which other ranks reach it; None: it is this rank's alone.
        shared: Whether it is the same memory on all ranks that reach it.
        written: The first op that writes it; None if none does, as it is filled before the first step.
        read: The last op that reads it; None if none does.
    """

    name: str
    kind: str
    dtype: str
    bytes: int
    peers: str | None
    shared: bool
    written: str | None
    read: str | None


@dataclass(frozen=True)
class Report:
    """The result of a check of two steps in a row, on all ranks side by side.

    Attributes:
        ranks: Number of ranks.
        kinds: Distinct schedules among them.
        micro_batches: Micro-batches of a step.
        ops: Ops of one rank in a step.
        collectives: Those of them that communicate.
        pairs: Pairs of ops on one part of a buffer, of which one writes, that were found to be in order.
        sent: Bytes that the rank that sends most sends in a step.
        memory: What rank 0 holds with Adam.
        unplanned: Ops of one rank that data may ask for besides, proved in steps that have them.
        buffers: The buffers of rank 0, in the order in which they are allocated.
        faults: What would go wrong; none for a schedule that is right.
    """

    ranks: int
    kinds: int
    micro_batches: int
    ops: int
    collectives: int
    pairs: int
    sent: int
    memory: Memory
    unplanned: int = 0
    buffers: tuple[BufferUse, ...] = ()
    faults: tuple[Fault, ...] = ()

    def require(self) -> Report:
        """This report, if there are no faults.

        Raises:
            ScheduleError: There are; its message has a line for each.
        """
        if self.faults:
            raise ScheduleError("\n".join(map(str, self.faults)))
        return self

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        memory = {**asdict(self.memory), "total": self.memory.total}
        return {**asdict(self), "memory": memory, "faults": [str(fault) for fault in self.faults]}


@dataclass(frozen=True)
class Lifetime:
    """For how long a buffer of a step holds something.

    Attributes:
        written: Position of the first op that writes it; None if none does, as it is filled before the first step.
        read: Position of the last op that reads it; None if none does.
    """

    written: int | None = None
    read: int | None = None


def lifetimes(ops: Sequence[Op]) -> Mapping[str, Lifetime]:
    """The first op that writes and the last that reads each buffer, as positions in a step's list of ops."""
    written: dict[str, int] = {}
    read: dict[str, int] = {}
    for position, op in enumerate(ops):
        for span in op.writes:
            written.setdefault(span.buffer, position)
        for span in op.reads:
            read[span.buffer] = position
    return {name: Lifetime(written.get(name), read.get(name)) for name in sorted({*written, *read})}


def uses(buffers: Iterable[Buffer], ops: Sequence[Op]) -> tuple[BufferUse, ...]:
    """Returns each buffer's row of the table: its kind, dtype and bytes, and the ops of a step that use it."""
    found = lifetimes(ops)

    def told(position: int | None) -> str | None:
        return None if position is None else words(ops[position])

    rows = ((buffer, found.get(buffer.name, Lifetime())) for buffer in buffers)
    return tuple(
        BufferUse(b.name, b.kind, b.dtype, b.bytes, b.stream, b.shared, told(life.written), told(life.read))
        for b, life in rows
    )


def words(op: Op | Key) -> str:
    """An op, such as "all_gather of blocks.3 (micro-batch 0, backward)"."""
    numbered = f"micro-batch {op.micro_batch}" if op.micro_batch >= 0 else f"unplanned {EXTRA - op.micro_batch}"
    when = "the step before" if op.micro_batch == PREVIOUS else numbered
    return f"{op.kind} of {op.target} ({when}, {op.phase})"


def within(step: int) -> str:
    """Returns words for the second of the two steps, and none for the first."""
    return " of the next step" if step else ""
