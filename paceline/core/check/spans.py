"""Buffers cut into parts that every op reads or writes as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from paceline.core.buffers import Buffer
from paceline.core.check.report import Fault, words
from paceline.core.ops import COMPUTE, Op, Span
from paceline.core.schedule import Schedule

Area = tuple[str, int, int]
"""Parts [first, stop) of a buffer."""


class Partition:
    """A rank's buffers, cut at every element at which some op begins or ends to read or write."""

    def __init__(self, buffers: Iterable[Buffer], spans: Iterable[Span]) -> None:
        """Takes all buffers, and every span that will be asked for."""
        cuts = {buffer.name: {0, buffer.numel} for buffer in buffers}
        for name, start, stop in spans:
            cuts[name].add(start)
            cuts[name].add(stop)
        self._cuts = {name: sorted(found) for name, found in cuts.items()}
        self._places = {name: {cut: index for index, cut in enumerate(found)} for name, found in self._cuts.items()}

    def parts(self) -> Iterator[tuple[str, int]]:
        """Each buffer with the number of its parts."""
        for name, cuts in self._cuts.items():
            yield name, len(cuts) - 1

    def area(self, span: Span) -> Area:
        """The parts of a span; none where it is empty."""
        places = self._places[span.buffer]
        return span.buffer, places[span.start], places[span.stop]

    def areas(self, spans: Iterable[Span]) -> tuple[Area, ...]:
        """The parts of each span that is not empty."""
        return tuple(self.area(span) for span in spans if span.start < span.stop)

    def span(self, area: Area) -> Span:
        """The inverse of `area`."""
        name, first, stop = area
        return Span(name, self._cuts[name][first], self._cuts[name][stop])


@dataclass(frozen=True)
class Accesses:
    """The parts of buffers that the ops of a rank's step read and write.

    Attributes:
        partition: The rank's buffers.
        reads: For each op, what it reads.
        writes: For each op, what it writes.
    """

    partition: Partition
    reads: Sequence[tuple[Area, ...]]
    writes: Sequence[tuple[Area, ...]]


def accesses(schedule: Schedule, ops: Sequence[Op], micro_batches: int, more: Iterable[Span]) -> Accesses:
    """Cuts a rank's buffers for its ops and for `more` spans, and says which parts each op touches."""
    spans = {span for op in ops for span in (*op.reads, *op.writes)}
    partition = Partition(schedule.buffers(micro_batches), (*spans, *more))
    reads = [partition.areas(op.reads) for op in ops]
    return Accesses(partition, reads, [partition.areas(op.writes) for op in ops])


def check_sizes(rank: int, schedule: Schedule, ops: Sequence[Op], micro_batches: int) -> Iterator[Fault]:
    """Finds spans outside of their buffers, and collectives that are not of the size of what they move."""
    buffers = schedule.buffers(micro_batches).by_name
    for op in ops:
        wrong = [span for span in (*op.reads, *op.writes) if not _lies_within(span, buffers.get(span.buffer))]
        for span in wrong:
            held = buffers.get(span.buffer)
            what = f"has {held.numel:,} elements" if held else "is in no table"
            yield Fault(
                *("size", rank, op.key),
                f"{words(op)} touches [{span.start:,}, {span.stop:,}) of buffer {span.buffer!r}, which {what}",
            )
        if wrong or op.kind in COMPUTE or op.kind == "barrier" or has_own_memory(op):
            continue
        for what, size in _moved(op, buffers, schedule.position_in(op.group)[1]):
            if size != op.bytes:
                yield Fault(*("size", rank, op.key), f"{words(op)} is of {op.bytes:,} bytes, but {what} {size:,}")
        if op.reads and buffers[op.reads[0].buffer].stream != op.stream:
            yield Fault(
                *("size", rank, op.key),
                f"{words(op)} sends from buffer {op.reads[0].buffer!r}, which peers cannot reach on stream {op.stream}",
            )


def has_own_memory(op: Op) -> bool:
    """Whether a collective that data asked for fills memory that is in no table, as it is needed for the moment.

    One that sends what lies in the table, and fills nothing here, fills other ranks' memory.
    """
    return not (op.planned or op.writes or op.kind in COMPUTE or (op.kind == "broadcast" and op.reads))


def _lies_within(span: Span, buffer: Buffer | None) -> bool:
    return buffer is not None and 0 <= span.start <= span.stop <= buffer.numel


def _moved(op: Op, buffers: dict[str, Buffer], ranks: int) -> Iterator[tuple[str, int]]:
    """Sizes of what a collective reads and of what it leaves, as the size of the whole that it is about."""

    def size(spans: Iterable[Span]) -> int:
        return sum((span.stop - span.start) * buffers[span.buffer].itemsize for span in spans)

    if op.kind == "all_gather":
        own = size(op.reads)
        in_place = any(span.buffer == op.reads[0].buffer for span in op.writes)
        yield "its shards together have", own * ranks
        yield "what it fills has", size(op.writes) + own * in_place
    elif op.kind == "broadcast":
        yield "what it sends or fills has", size((*op.reads, *op.writes))
    else:
        whole = op.reads[:1]
        yield "what it reduces has", size(whole)
        (result,) = op.writes[-1:] or whole
        if result not in whole:
            elements = result.stop - result.start
            parts = ranks if op.kind == "reduce_scatter" else 1
            yield "its result is for", elements * parts * buffers[whole[0].buffer].itemsize
