"""The meaning of a rank's buffers: which elements of which bucket belong into which parts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from paceline.core.check.spans import Accesses, Area, accesses
from paceline.core.layout import Bucket
from paceline.core.ops import STATISTICS, Op, Span
from paceline.core.schedule import Schedule


class Value(NamedTuple):
    """The value of a part of a buffer.

    Two parts of equal values hold one run of elements: of parameters, gradients or statistics.
    """

    what: str
    """parameter, gradient or statistics; else why there is nothing of use."""
    flat: int = 0
    origin: int = 0
    """Where in the buffer the flat buffer's first element would lie."""
    width: int = 1
    """Places in the buffer that an element takes: more than one where they are bytes."""
    content: int = 0
    """Of parameters, how often they were updated; of others, the number of a sum (see `sums`)."""


class Region(NamedTuple):
    """Where a run of elements of a flat buffer lies."""

    areas: tuple[Area, ...]
    flat: int
    origin: int
    width: int

    def holding(self, what: str, content: int) -> Value:
        """The value of its parts when they hold this."""
        return Value(what, self.flat, self.origin, self.width, content)


class Facts:
    """One rank's schedule, and where in its buffers the tensors of each bucket lie.

    Ranks whose ops touch the same spans share one.
    """

    def __init__(self, schedule: Schedule, ops: tuple[Op, ...], micro_batches: int, shared: Iterable[Span]) -> None:
        """Cuts the buffers for a rank's ops; in shared ones also where other ranks' ops begin and end."""
        self.schedule, self.ops = schedule, ops
        self.buffers = schedule.buffers(micro_batches)
        self.accesses: Accesses = accesses(schedule, ops, micro_batches, {*shared, *self._spans()})

    def _spans(self) -> Iterable[Span]:
        if self.schedule.world_size > 1:
            yield self.statistics
        for bucket in self.schedule.layout.buckets:
            yield from (self.buffers.shard(bucket), self.buffers.master(bucket), self.buffers.unsharded(bucket))
            if bucket.trainable and self.schedule.copies_gradients:
                whole = self.buffers.gradient(bucket)
                yield from (whole, self.buffers.own_gradient(bucket), self.buffers.reduced(bucket))
                yield self.buffers.published(bucket)
                for span in (whole, self.buffers.published(bucket)) if self.schedule.world_size == 1 else (whole,):
                    yield from self._payload_in(span, bucket)

    @cached_property
    def by_name(self) -> dict[str, Bucket]:
        """Buckets by name."""
        return {bucket.name: bucket for bucket in self.schedule.layout.buckets}

    @cached_property
    def payload(self) -> dict[str, list[tuple[int, int]]]:
        """For each bucket, the elements of its flat buffer that are not padding."""
        found: dict[str, list[tuple[int, int]]] = {}
        for bucket in self.schedule.layout.buckets:
            runs: list[tuple[int, int]] = []
            for index in bucket.slots:
                slot = self.schedule.layout.slots[index]
                if runs and runs[-1][1] == slot.offset:
                    runs[-1] = (runs[-1][0], slot.stop)
                elif slot.offset < slot.stop:
                    runs.append((slot.offset, slot.stop))
            found[bucket.name] = runs
        return found

    def region(self, span: Span, start: int, stop: int, flat: int) -> Region:
        """Where elements [start, stop) of a flat buffer lie, if they fill `span`."""
        width = max(1, (span.stop - span.start) // max(stop - start, 1))
        return Region(self.accesses.partition.areas((span,)), flat, span.start - start * width, width)

    @cached_property
    def unsharded(self) -> dict[str, Region]:
        """Each bucket's whole parameters."""
        buckets = self.schedule.layout.buckets
        return {b.name: self.region(self.buffers.unsharded(b), b.start, b.stop, b.flat) for b in buckets}

    @cached_property
    def shard(self) -> dict[str, Region]:
        """This rank's shard of each bucket, as it is computed with."""
        return {b.name: self._share(self.buffers.shard(b), b) for b in self.schedule.layout.buckets}

    @cached_property
    def master(self) -> dict[str, Region]:
        """This rank's shard of each bucket, as it is updated."""
        return {b.name: self._share(self.buffers.master(b), b) for b in self.schedule.layout.buckets}

    @cached_property
    def reduced(self) -> dict[str, Region]:
        """This rank's shard of the reduced gradients, without padding where nothing is reduced."""
        if self.schedule.world_size == 1:
            return self.gradient
        return {b.name: self._share(self.buffers.reduced(b), b) for b in self.schedule.reduced_buckets}

    @cached_property
    def published(self) -> dict[str, Region]:
        """`reduced`, as it is updated with."""
        if self.schedule.world_size == 1:
            return {b.name: self._without_padding(self.buffers.published(b), b) for b in self.schedule.reduced_buckets}
        return {b.name: self._share(self.buffers.published(b), b) for b in self.schedule.reduced_buckets}

    @cached_property
    def gradient(self) -> dict[str, Region]:
        """Each bucket's whole gradients, without padding."""
        return {b.name: self._without_padding(self.buffers.gradient(b), b) for b in self.schedule.reduced_buckets}

    def _without_padding(self, span: Span, bucket: Bucket) -> Region:
        areas = self.accesses.partition.areas(self._payload_in(span, bucket))
        return Region(areas, bucket.flat, span.start - bucket.start, 1)

    def _payload_in(self, span: Span, bucket: Bucket) -> Iterable[Span]:
        """Where the elements of a bucket that are not padding lie in a span that holds all of it."""
        shift = span.start - bucket.start
        return (Span(span.buffer, start + shift, stop + shift) for start, stop in self.payload[bucket.name])

    @cached_property
    def copied(self) -> dict[str, dict[Span, Region]]:
        """For each unit, the spans that its gradients are copied to."""
        found: dict[str, dict[Span, Region]] = {}
        for bucket in self.schedule.reduced_buckets:
            shift = self.buffers.gradient(bucket).start - bucket.start
            for index in bucket.slots:
                slot = self.schedule.layout.slots[index]
                span = self.buffers.gradient_of(slot, bucket)
                found.setdefault(slot.spec.unit, {})[span] = Region((), bucket.flat, shift, 1)
        return found

    def is_own_shard(self, position: int, ranks: int) -> bool:
        """Whether the part of the `position`-th among so many ranks is this rank's shard."""
        return (position, ranks) == (self.schedule.shard_index, self.schedule.shards)

    @property
    def statistics(self) -> Span:
        """The span of the statistics, which ranks agree on."""
        return Span(STATISTICS, 0, self.schedule.statistics)

    def _share(self, span: Span, bucket: Bucket) -> Region:
        start, stop = bucket.shard(self.schedule.shard_index, self.schedule.shards)
        return self.region(span, start, stop, bucket.flat)
