"""Every buffer that a rank holds, as a table: the engine allocates from it, `memory` adds it up. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from paceline.core.layout import ALIGNMENT, Bucket, Flat, Slot
from paceline.core.ops import Span, Stream
from paceline.core.placement import Placement

BufferKind = Literal["parameters", "master", "unsharded", "gradients", "slots", "reduced", "widened", "statistics"]
"""parameters: what is computed with, or this rank's shards of it. master: this rank's share as it is updated, in
another dtype. unsharded: gathered units. gradients: whole, for as long as a step. slots: whole gradients from copy-in
to reduction. reduced: this rank's share of the reduced gradients, where it does not lie in the whole ones. widened:
that share in the dtype that is updated, where it is reduced in another. statistics: what ranks agree on."""

USER_SUMS = 16
"""Number of sums of a training loop's own that the statistics hold at most."""

CHECKS = 3
"""Number of the statistics that must be the same on every rank, each with its square."""


def statistics_numel(parameters: int) -> int:
    """Number of fp64 elements that ranks agree on, for a model of so many parameters."""
    return 3 * parameters + USER_SUMS + 3 + 2 * CHECKS


@dataclass(frozen=True, slots=True)
class Buffer:
    """One flat allocation of a rank, which lives as long as the engine unless it is `transient`."""

    name: str
    kind: BufferKind
    dtype: str
    """Name of the dtype without its module."""
    itemsize: int
    """Bytes per element."""
    numel: int
    stream: Stream | None = None
    """The stream whose transport allocates it, as peers reach it there; None: it is this rank's alone."""
    shared: bool = False
    """Whether it is the same memory on all ranks of that stream's group."""
    transient: bool = False
    """Whether the op that writes it allocates it, tensor by tensor, and it is gone when gradients are dropped."""

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.itemsize

    @property
    def whole(self) -> Span:
        """All of it."""
        return Span(self.name, 0, self.numel)


@dataclass(frozen=True)
class Buffers:
    """The table of a placement's buffers, and where in them each bucket's tensors lie.

    Attributes:
        placement: What is sharded, and in which slots.
        sums: Whether reduced gradients are summed over micro-batches in which they are reduced. They are then as wide
            as the master.
        statistics: Number of fp64 elements that ranks agree on.
    """

    placement: Placement
    sums: bool = False
    statistics: int = 0

    def __iter__(self) -> Iterator[Buffer]:
        """All buffers, in the order in which they are allocated."""
        yield from self.by_name.values()

    @cached_property
    def by_name(self) -> dict[str, Buffer]:
        """All buffers by name."""
        tables = (self._parameters, self._unsharded, self._gradients, self._reduced, self._widened, self._statistics)
        return {buffer.name: buffer for table in tables for buffer in table()}

    # ---- the table

    def _parameters(self) -> Iterator[Buffer]:
        place = self.placement
        sent = place.sends_updates_on
        for index, flat in enumerate(place.layout.flats):
            if place.shards_parameters:
                yield Buffer(f"parameters {index}", "parameters", *_computed(flat), flat.numel // place.shards, sent)
                continue
            # What nobody updates is sent to nobody, and each rank may edit it for itself.
            carrier = sent if flat.trainable else None
            shared = place.shares_memory and flat.trainable
            yield Buffer(f"parameters {index}", "parameters", *_computed(flat), flat.numel, carrier, shared)
        for index, flat in enumerate(place.layout.flats):
            if has_master(flat):
                share = flat.numel // place.shards
                yield Buffer(f"master {index}", "master", *_updated(flat), share, sent)

    def _unsharded(self) -> Iterator[Buffer]:
        place = self.placement
        sizes: dict[int, int] = {}
        for unit, slot in place.slot.items():
            sizes[slot] = max(sizes.get(slot, 0), sum(_aligned(b.bytes) for b in place.gathered_buckets[unit]))
        for slot, size in sizes.items():
            yield Buffer(f"unsharded slot {slot}", "unsharded", "uint8", 1, size)
        for bucket in place.kept_buckets:
            flat = place.layout.flats[bucket.flat]
            yield Buffer(f"unsharded {bucket.name}", "unsharded", *_computed(flat), bucket.numel)

    def _gradients(self) -> Iterator[Buffer]:
        place = self.placement
        if not place.copies_gradients or self._adds_locally:
            return
        stream: Stream | None = "reduce" if "reduce" in place.groups else None
        if not place.reuses_gradient_slots:
            for index, flat in enumerate(place.layout.flats):
                if flat.trainable:
                    yield Buffer(f"gradients {index}", "gradients", *_reduced_in(flat), flat.numel, stream)
            return
        sizes: dict[tuple[int, str, int], int] = {}
        for bucket in place.reduced_buckets:
            key = (place.gradient_slot[bucket.name], *_reduced_in(place.layout.flats[bucket.flat]))
            sizes[key] = max(sizes.get(key, 0), bucket.numel)
        for slot, dtype, itemsize in sorted(sizes):
            name = f"gradient slot {slot} {dtype}"
            yield Buffer(name, "slots", dtype, itemsize, sizes[slot, dtype, itemsize], stream)

    def _reduced(self) -> Iterator[Buffer]:
        place = self.placement
        if not self.has_reduced:
            return
        # Replicas reduce a shard among each other where its own transport reaches it.
        stream: Stream | None = "replicate" if "replicate" in place.groups else None
        for index, flat in enumerate(place.layout.flats):
            if flat.trainable:
                dtype, itemsize = _updated(flat) if self.sums else _reduced_in(flat)
                name = f"reduced {index} {dtype}"
                yield Buffer(name, "reduced", dtype, itemsize, flat.numel // place.shards, stream)

    def _widened(self) -> Iterator[Buffer]:
        place = self.placement
        for index, flat in enumerate(place.layout.flats):
            if place.copies_gradients and flat.trainable and not self.sums and _reduced_in(flat) != _updated(flat):
                size = flat.numel // place.shards
                yield Buffer(f"widened {index}", "widened", *_updated(flat), size, transient=True)

    def _statistics(self) -> Iterator[Buffer]:
        if self.placement.world_size > 1:
            yield Buffer("statistics", "statistics", "float64", 8, self.statistics, "statistics")

    # ---- where a bucket's tensors lie

    @cached_property
    def has_reduced(self) -> bool:
        """Whether reduced gradients lie in buffers of their own, not in the whole ones."""
        place = self.placement
        return place.copies_gradients and (
            self.sums or place.reuses_gradient_slots or 1 < place.shards < place.world_size
        )

    @property
    def _adds_locally(self) -> bool:
        """Whether gradients are summed over micro-batches as they are copied in: one rank has nothing to reduce."""
        return self.sums and self.placement.world_size == 1

    def unsharded(self, bucket: Bucket) -> Span:
        """A bucket's whole parameters, to compute with; in bytes where they lie in a slot."""
        return self._places[bucket.name]

    @cached_property
    def _places(self) -> dict[str, Span]:
        # Once, as every op of every micro-batch asks.
        place = self.placement
        if not place.shards_parameters:
            return {b.name: Span(f"parameters {b.flat}", b.start, b.stop) for b in place.layout.buckets}
        found = {bucket.name: Span(f"unsharded {bucket.name}", 0, bucket.numel) for bucket in place.kept_buckets}
        for unit, slot in place.slot.items():
            first = 0
            for bucket in place.gathered_buckets[unit]:
                found[bucket.name] = Span(f"unsharded slot {slot}", first, first + bucket.bytes)
                first += _aligned(bucket.bytes)
        return found

    def shard(self, bucket: Bucket) -> Span:
        """This rank's shard of a bucket's parameters, in the dtype that is computed with."""
        place = self.placement
        if place.shards_parameters:
            return self._share(f"parameters {bucket.flat}", bucket)
        return Span(f"parameters {bucket.flat}", *bucket.shard(place.shard_index, place.shards))

    def master(self, bucket: Bucket) -> Span:
        """This rank's shard of a bucket's parameters, as they are updated."""
        if has_master(self.placement.layout.flats[bucket.flat]):
            return self._share(f"master {bucket.flat}", bucket)
        return self.shard(bucket)

    def gradient(self, bucket: Bucket) -> Span:
        """A bucket's whole gradients, as they are reduced."""
        place = self.placement
        if self._adds_locally:
            return self.reduced(bucket)
        if place.reuses_gradient_slots:
            slot, flat = place.gradient_slot[bucket.name], place.layout.flats[bucket.flat]
            return Span(f"gradient slot {slot} {flat.gradient}", 0, bucket.numel)
        return Span(f"gradients {bucket.flat}", bucket.start, bucket.stop)

    def gradient_of(self, slot: Slot, bucket: Bucket) -> Span:
        """One parameter's whole gradient."""
        span = self.gradient(bucket)
        first = span.start + slot.offset - bucket.start
        return Span(span.buffer, first, first + slot.spec.numel)

    def own_gradient(self, bucket: Bucket) -> Span:
        """This rank's shard of a bucket's whole gradients: where a reduction in place leaves its result."""
        whole, place = self.gradient(bucket), self.placement
        size = bucket.numel // place.shards
        return Span(whole.buffer, whole.start + place.shard_index * size, whole.start + (place.shard_index + 1) * size)

    def reduced(self, bucket: Bucket) -> Span:
        """This rank's shard of the step's reduced gradients of a bucket."""
        if not self.has_reduced:
            return self.own_gradient(bucket)
        flat = self.placement.layout.flats[bucket.flat]
        dtype = flat.master if self.sums else flat.gradient
        return self._share(f"reduced {bucket.flat} {dtype}", bucket)

    def published(self, bucket: Bucket) -> Span:
        """This rank's shard of the reduced gradients of a bucket, as it is updated with."""
        name = f"widened {bucket.flat}"
        return self._share(name, bucket) if name in self.by_name else self.reduced(bucket)

    def _share(self, name: str, bucket: Bucket) -> Span:
        """A bucket's place in a buffer that holds this rank's shards of a flat buffer."""
        shards = self.placement.shards
        return Span(name, bucket.start // shards, bucket.stop // shards)


def has_master(flat: Flat) -> bool:
    """Whether parameters are updated in another dtype than they are computed with."""
    return flat.master != flat.dtype


def _computed(flat: Flat) -> tuple[str, int]:
    return flat.dtype, flat.itemsize


def _updated(flat: Flat) -> tuple[str, int]:
    return flat.master, flat.master_itemsize


def _reduced_in(flat: Flat) -> tuple[str, int]:
    return flat.gradient, flat.gradient_itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
