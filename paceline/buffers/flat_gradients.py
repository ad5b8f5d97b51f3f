"""Where gradients lie: whole, as this rank computes them, and reduced; and each parameter's view of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from paceline.buffers.handed_out import HandedOut
from paceline.buffers.memory import Tensors, parameter_in
from paceline.buffers.storage_uses import storage_of
from paceline.core.buffers import Buffers
from paceline.core.layout import Bucket
from paceline.core.schedule import Schedule


class FlatGradients:
    """The flat buffers of gradients.

    Attributes:
        schedule: Gives layout, buffers and slots.
        buckets: Those whose gradients are reduced.
        bucket_of: The bucket of each trainable parameter, by index.
        trainable: Indices of the parameters that get gradients.
        views: The whole gradient of each trainable parameter, by index.
        gaps: Elements after a parameter's that are no other's, by its index, where buckets share memory and blocks of
            elements a scale: what another bucket has left there must not decide on it.
        adds: Names of the buckets whose next reduction is added to what was reduced before.
        each: Whether every micro-batch is reduced.
    """

    def __init__(self, schedule: Schedule, tensors: Tensors, micro_batches: int) -> None:
        """Allocates the buffers. A collective call where ranks communicate.

        Args:
            schedule: See above.
            tensors: Allocates them.
            micro_batches: 1, or 2 where a step may have several.
        """
        self.schedule, self._tensors = schedule, tensors
        self._layout = schedule.layout
        self._shards, self._index = schedule.shards, schedule.shard_index
        # One rank has nothing to reduce: what its micro-batches give adds up as it is copied in.
        self.each = schedule.strategy.reduces_every_micro_batch and schedule.world_size > 1
        self.buckets = schedule.reduced_buckets
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.slots}
        self.trainable = sorted(self.bucket_of)
        self.adds: set[str] = set()
        self._buffers: Buffers = schedule.buffers(micro_batches)
        self._tensors.allocate(self._buffers, "gradients", "slots", "reduced")
        self._handed_out = HandedOut()
        self._view()

    @property
    def sums(self) -> bool:
        """Whether reduced gradients are summed over micro-batches in buffers of their own."""
        return bool(self._buffers.sums)

    def sum_over_micro_batches(self) -> None:
        """From now on reduced gradients are summed over micro-batches, beside the whole ones where these are sent."""
        self._buffers = self.schedule.buffers(2)
        if self.each:
            self._tensors.allocate(self._buffers, "reduced")
        else:
            self._tensors.allocate(self._buffers, "gradients", "reduced")
        self._view()

    def _view(self) -> None:
        # Once, as every step asks for all of them.
        self._whole = {bucket.name: self._tensors[self._buffers.gradient(bucket)] for bucket in self.buckets}
        self._reduced = {bucket.name: self._tensors[self._buffers.reduced(bucket)] for bucket in self.buckets}
        self.views = {
            index: parameter_in(self.whole(bucket), self._layout.slots[index], bucket.start)
            for index, bucket in self.bucket_of.items()
        }
        coarse = self.schedule.strategy.wire == "int8" and self.schedule.reuses_gradient_slots
        self.gaps = self._gaps() if coarse else {}
        self._reduced_views = {index: self._reduced_view(index) for index in self.trainable}
        self._places = {index: self._place_of(index, view) for index, view in self._reduced_views.items()}

    def _gaps(self) -> dict[int, Tensor]:
        gaps, slots = dict[int, Tensor](), self._layout.slots
        for bucket in self.buckets:
            indices = sorted(bucket.slots, key=lambda index: slots[index].offset)
            starts = [*(slots[index].offset for index in indices[1:]), bucket.stop]
            for index, start in zip(indices, starts, strict=True):
                if slots[index].stop < start:
                    gaps[index] = self.whole(bucket)[slots[index].stop - bucket.start : start - bucket.start]
        return gaps

    def whole(self, bucket: Bucket) -> Tensor:
        """The whole gradients of a bucket, flat."""
        return self._whole[bucket.name]

    def own(self, bucket: Bucket, whole: Tensor) -> Tensor:
        """This rank's shard of a bucket's whole gradients, which a reduction in place leaves there."""
        size = bucket.numel // self._shards
        return whole[self._index * size : (self._index + 1) * size]

    def reduced(self, bucket: Bucket) -> Tensor:
        """This rank's shard of the step's reduced gradients of a bucket, flat."""
        return self._reduced[bucket.name]

    def destination(self, bucket: Bucket) -> Tensor | None:
        """Where a reduction stores this rank's shard, if neither in place nor added to what is there."""
        stores = self._buffers.has_reduced and not self._is_added(bucket)
        return self.reduced(bucket) if stores and self._shards > 1 else None

    def after_reduction(self, bucket: Bucket) -> Callable[[], None] | None:
        """Returns the function that stores or adds a bucket's gradients after this reduction; None: in place."""
        adds = self._is_added(bucket)
        if not self._buffers.has_reduced or (self._shards > 1 and not adds):
            return None
        total, own = self.reduced(bucket), self.own(bucket, self.whole(bucket))

        def store() -> None:
            with torch.no_grad():
                if adds:
                    total.add_(own)
                else:
                    total.copy_(own)

        return store

    def _is_added(self, bucket: Bucket) -> bool:
        return self.each and bucket.name in self.adds

    def own_part(self, index: int, whole: Tensor) -> Tensor:
        """The part of a parameter's whole gradient that is in this rank's shard."""
        if self._shards == 1:
            return whole
        slot = self._layout.slots[index]
        start, stop = self._layout.shard_of(self.bucket_of[index], index, self._index, self._shards)
        # One without elements may lie before the parameter.
        first = start - slot.offset if start < stop else 0
        return whole.as_strided((stop - start,), (1,), int(whole.storage_offset()) + first)

    def show_in(self, index: int, other: Tensor, gradient: Tensor) -> None:
        """Copies a parameter's gradient, or this rank's shard of it, to its place in a whole one, once it has come."""
        is_whole = other.shape == gradient.shape
        if not is_whole and (other.shape, other.stride()) != (self.views[index].shape, self.views[index].stride()):
            return
        if (wait := gradient.__dict__.get("_wait")) is not None:
            wait()
        part = other if is_whole else self.own_part(index, other)
        part.copy_(gradient)

    def reduced_of(self, index: int) -> Tensor:
        """The reduced gradient of a parameter, or this rank's shard of it, which may be empty."""
        return self._reduced_views[index]

    def _reduced_view(self, index: int) -> Tensor:
        slot, bucket = self._layout.slots[index], self.bucket_of[index]
        reduced = self.reduced(bucket)
        if self._shards == 1:
            return parameter_in(reduced, slot, bucket.start)
        start, stop = self._layout.shard_of(bucket, index, self._index, self._shards)
        first = bucket.shard(self._index, self._shards)[0]
        return reduced[start - first : stop - first]

    def shown_whole(self, index: int) -> Tensor:
        """A parameter's whole gradient, to be handed out as its `grad`."""
        bucket = self.bucket_of[index]
        return self._handed_out.view(f"{bucket.name}, whole", self.whole(bucket), self.views[index])

    def _place_of(self, index: int, view: Tensor) -> tuple[str, tuple[torch.Size, tuple[int, ...], int]] | None:
        if not view.numel():
            return None
        bucket = self.bucket_of[index]
        offset = int(view.storage_offset()) - int(self.reduced(bucket).storage_offset())
        return bucket.name, (view.shape, view.stride(), offset)

    def shown_reduced(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """The reduced gradients of some parameters, to become the memory of what is handed out as their `grad`."""
        found, over = dict[int, Tensor](), dict[str, Tensor]()
        for index in indices:
            if (place := self._places[index]) is None:
                found[index] = torch.empty_like(self._reduced_views[index])
                continue
            name, part = place
            if (shown := over.get(name)) is None:
                shown = over[name] = self._handed_out.over(f"{name}, reduced", self._reduced[name])
            found[index] = shown.as_strided(*part)
        return found

    def release(self, gradients: Iterable[Tensor]) -> bool:
        """Buckets are about to be written again; what a loop keeps of those that it dropped `p.grad` of stays.

        Args:
            gradients: What is `p.grad` now, and is added to.

        Returns:
            Whether that takes other memory for the buffers: see `take_other_memory`.
        """
        with torch._C.DisableTorchFunctionSubclass():
            known = Counter(map(storage_of, gradients))
        stays = False
        for bucket in self.buckets:
            for what in ("whole", "reduced"):
                stays |= self._handed_out.release(f"{bucket.name}, {what}", known)
        return stays

    def handed_out(self) -> set[int]:
        """The `storage_of` what was handed out and lies in the buffers: after `release`, as `grad` alone."""
        return self._handed_out.storages()

    def take_other_memory(self) -> None:
        """Leaves the buffers' memory, in which nothing is under way, to who has views of it.

        What `p.grad` holds is from now on as if a loop had made it.
        """
        self._handed_out = HandedOut()
        self._tensors.allocate(self._buffers, "gradients", "slots", "reduced")
        self._view()
