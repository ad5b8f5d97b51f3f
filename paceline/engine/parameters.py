"""Parameters of one rank: whole to compute with, and this rank's shards of them to update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.core.buffers import Buffers, has_master
from paceline.core.errors import EngineError
from paceline.core.layout import Bucket
from paceline.core.schedule import Schedule
from paceline.engine.edits import Edits
from paceline.engine.handed_out import HandedOut
from paceline.engine.sharded_parameter import Owner, disown, guard, own, unguard
from paceline.engine.tensors import Tensors, parameter_in, placeholder
from paceline.engine.unsharded import Unsharded

Gather = Callable[[Tensor, Tensor, str], None]
"""(buffer, this rank's shard, label): fills the buffer from all shards; a collective call."""


class Parameters:
    """The user's parameter objects, and the views of flat buffers that `p.data` is given.

    A parameter's shape and dtype are always those that it is computed with; only inside `optimizer.step()` is its data
    this rank's shard, as it is updated. Where it is not there to compute with (sharded at zero 3, or an update of it
    still on its way), its class asks the engine first: see `sharded_parameter`.

    Attributes:
        all: In the order of `layout.slots`.
        index_of: The index of each by its `id()`.
        layout: Where they lie.
        managed: Indices of those whose data changes: sharded, or updated in another dtype.
        buckets: By name.
        contents: Which parameters a bucket holds, in words, by its name.
        unsharded: Which sharded units lie gathered where.
        waiting: Names of the buckets whose update is still on its way from the ranks that made it.
        pinned: Indices of sharded parameters that were used outside their unit, and stay whole until the next forward
            or update.
    """

    def __init__(
        self,
        schedule: Schedule,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        tensors: Tensors,
        owner: Owner,
        turns: Iterable[Iterable[nn.Parameter]] | None = None,
    ) -> None:
        """Moves parameters into flat buffers. A collective call where peers reach these.

        Args:
            schedule: Gives layout, buffers and slots.
            parameters: In the order of `layout.slots`.
            device: Where the buffers live.
            tensors: Allocates the buffers.
            owner: Is asked before a sharded parameter is used.
            turns: Yields each parameter once, in groups that are whole until the next is asked for; by default all are
                whole already.
        """
        self.all = list(parameters)
        self.index_of = {id(parameter): index for index, parameter in enumerate(self.all)}
        self.layout = layout = schedule.layout
        self.buckets = {bucket.name: bucket for bucket in layout.buckets}
        self.contents = {bucket.name: _contents(bucket, schedule) for bucket in layout.buckets}
        self.bucket_of = {index: bucket for bucket in layout.buckets for index in bucket.slots}
        self._device, self._tensors = device, tensors
        self._buffers: Buffers = schedule.buffers()
        self._shards, self._index = schedule.shards, schedule.shard_index
        self.is_sharded, self._shared = schedule.shards_parameters, schedule.shares_memory
        self._dtypes = [getattr(torch, flat.dtype) for flat in layout.flats]
        self.has_masters = any(has_master(flat) for flat in layout.flats)
        tensors.allocate(self._buffers, "parameters", "master")
        with torch.no_grad():
            for whole in turns if turns is not None else (self.all,):
                for parameter in whole:
                    self._take(self.index_of[id(parameter)])
        self._local = {index: self._local_view(index) for index in self.bucket_of if self._is_managed(index)}
        self.managed = sorted(self._local)
        self._managed_of: dict[str, list[int]] = {}
        for index in self.managed:
            self._managed_of.setdefault(layout.slots[index].spec.unit, []).append(index)
        self.waiting: set[str] = set()
        self._handed_out, self._own_uses = HandedOut(), 0
        self.pinned: dict[int, Tensor] = {}
        self._pins: dict[str, Tensor] = {}
        self._open: set[str] = set()
        self._version = 0
        self._whole: list[Tensor] = []
        self._placeholder: dict[int, Tensor] = {}
        self.assign_slots(schedule)
        self._edits = self._watch_edits()
        for index in self.managed:
            own(self.all[index], owner, index)
        for parameter, whole in zip(self.all, self._whole, strict=True):
            parameter.data = whole
        if self.is_sharded:
            self._placeholder = {index: placeholder(self._whole[index]) for index in self.managed}
        self.rest()
        self._edits.set()
        self._own_uses = self._uses()

    def _is_managed(self, index: int) -> bool:
        flat = self.layout.flats[self.layout.slots[index].flat]
        return self._shards > 1 or has_master(flat)

    def _watch_edits(self) -> Edits:
        """Where edits of what is computed with would not reach what is updated, or would reach other ranks."""
        lost = [] if self.is_sharded or not (self.has_masters or self._shared) else self.managed
        shards: dict[int, Tensor] = {}
        for index in lost:
            start, stop = self._range(index)
            span = self._buffers.shard(self.bucket_of[index])
            first = self.bucket_of[index].shard(self._index, self._shards)[0]
            shards[index] = self._tensors[span][start - first : stop - first]
        return Edits(self.all, shards)

    # ---- buffers

    def whole(self, bucket: Bucket) -> Tensor:
        """All parameters of a bucket, flat, to compute with."""
        return self._tensors.typed(self._buffers.unsharded(bucket), self._dtypes[bucket.flat])

    def shard(self, bucket: Bucket) -> Tensor:
        """This rank's shard of a bucket's parameters, flat, in the dtype that is computed with."""
        return self._tensors[self._buffers.shard(bucket)]

    def master(self, bucket: Bucket) -> Tensor:
        """This rank's shard of a bucket's parameters, flat, as they are updated."""
        return self._tensors[self._buffers.master(bucket)]

    def assign_slots(self, schedule: Schedule) -> None:
        """Gives gathered units their slots, which the order they run in decides."""
        self._buffers = schedule.buffers()
        self._tensors.allocate(self._buffers, "unsharded")
        self._kept = schedule.kept_buckets
        self.unsharded = Unsharded(schedule)
        self._whole = [self._whole_view(index) for index in range(len(self.layout.slots))]

    def _range(self, index: int) -> tuple[int, int]:
        """The elements of its flat buffer that are this rank's of a parameter."""
        return self.layout.shard_of(self.bucket_of[index], index, self._index, self._shards)

    def _take(self, index: int) -> None:
        """Copies a parameter that is whole to where it, or this rank's shard of it, lies from now on."""
        slot, values = self.layout.slots[index], self.all[index].detach()
        spec = slot.spec
        if values.stride() != spec.stride:
            dense = torch.empty_strided(spec.shape, spec.stride, dtype=values.dtype, device=values.device)
            values = dense.copy_(values)
        values = values.as_strided((spec.numel,), (1,))
        bucket = self.bucket_of.get(index)
        if not self.is_sharded:
            self._tensors.by_name[f"parameters {slot.flat}"][slot.offset : slot.stop].copy_(values)
        if bucket is None:
            return
        start, stop = self._range(index)
        if start < stop and (self.is_sharded or has_master(self.layout.flats[slot.flat])):
            first = bucket.shard(self._index, self._shards)[0]
            for target in {id(t): t for t in (self.shard(bucket), self.master(bucket))}.values():
                target[start - first : stop - first].copy_(values[start - slot.offset : stop - slot.offset])

    def _local_view(self, index: int) -> Tensor:
        slot, bucket = self.layout.slots[index], self.bucket_of[index]
        if self._shards == 1:
            return parameter_in(self.master(bucket), slot, bucket.start)
        start, stop = self._range(index)
        first = bucket.shard(self._index, self._shards)[0]
        return self.master(bucket)[start - first : stop - first]

    def _whole_view(self, index: int) -> Tensor:
        slot, bucket = self.layout.slots[index], self.bucket_of.get(index)
        if not self.is_sharded:
            name = f"parameters {slot.flat}"
            whole = self._tensors.by_name[name]
            view = parameter_in(whole, slot, 0)
            return self._handed_out.view(name, whole, view) if self._shards > 1 else view
        if bucket is None:
            # It has no elements.
            return torch.empty_strided(
                slot.spec.shape, slot.spec.stride, dtype=self._dtypes[slot.flat], device=self._device
            )
        return parameter_in(self.whole(bucket), slot, bucket.start)

    def memory_of(self, unit: str) -> Callable[[Tensor], bool]:
        """Tells of a tensor whether it lies in the memory that a gathered unit's parameters are in for now."""
        memory = {self._whole[index].untyped_storage().data_ptr() for index in self._managed_of.get(unit, ())}
        return lambda tensor: tensor.untyped_storage().data_ptr() in memory

    # ---- what p.data is

    def unshard(self, units: Iterable[str]) -> None:
        """Lets the parameters of some units, which are here, be computed with."""
        for unit in units:
            if unit not in self._open:
                self._open.add(unit)
                self._present(self._managed_of.get(unit, ()), self._whole)

    def is_open(self, unit: str) -> bool:
        """Whether the parameters of a unit can be computed with."""
        return unit in self._open

    def reshard(self, units: Iterable[str]) -> None:
        """Ends computing with the parameters of some gathered units.

        Raises:
            EngineError: One was written to while it was gathered.
        """
        for unit in units:
            if unit in self._open:
                self._open.discard(unit)
                self._hide(self._managed_of.get(unit, ()))

    def _present(self, indices: Iterable[int], views: Sequence[Tensor]) -> None:
        shown = [index for index in indices if index not in self.pinned]
        for index in shown:
            unguard(self.all[index])
            if self.is_sharded:
                self.all[index].data = views[index]
        self._set_versions([self.all[index] for index in shown], self._version)

    def _hide(self, indices: Iterable[int]) -> None:
        hidden = [index for index in indices if index not in self.pinned]
        for index in hidden:
            if self._is_changed(index):
                raise EngineError(
                    f"{self.layout.slots[index].spec.name} was written to in a forward or backward, but this rank "
                    "keeps only its shard of it: edit inside `with pl.full_parameters(model):`, on every rank"
                )
        for index in hidden:
            self.all[index].data = self._placeholder[index]
            guard(self.all[index])
        # A graph that still needs these values must not find others in their place.
        self._set_versions([self.all[index] for index in hidden], self._version + 1)

    def _is_changed(self, index: int) -> bool:
        """Whether a gathered parameter was written to in place, or given other data."""
        return self._is_moved(index) or self.all[index]._version != self._version

    def _is_moved(self, index: int) -> bool:
        """Whether a parameter was given other data: a module that casts its own, as some routers do, has a copy."""
        parameter, whole = self.all[index], self._whole[index]
        return parameter.dtype == whole.dtype and parameter.data_ptr() != whole.data_ptr()

    def _set_versions(self, parameters: Sequence[Tensor], version: int) -> None:
        if parameters and self.is_sharded:
            torch._C._autograd._unsafe_set_version_counter(tuple(parameters), (version,) * len(parameters))

    def rest(self) -> None:
        """Lets all parameters be what they are outside of forward and backward."""
        self._open.clear()
        asks = self.loses_edits or bool(self.waiting)
        rests = [index for index in self.managed if index not in self.pinned]
        for index in rests:
            unguard(self.all[index])
            self.all[index].data = self._placeholder[index] if self.is_sharded else self._whole[index]
            if asks:
                guard(self.all[index])
        self._set_versions([self.all[index] for index in rests], self._version + 1)

    def _uses(self) -> int:
        return sum(self._handed_out.uses(f"parameters {index}") for index in range(len(self.layout.flats)))

    @property
    def has_aliases(self) -> bool:
        """Whether a loop has tensors in the memory of parameters, reading which nobody is asked: on CPUs.

        To be asked where parameters rest.
        """
        return self._uses() > self._own_uses

    def arrived(self, buckets: Iterable[str]) -> None:
        """The updates of some buckets are here."""
        self.waiting.difference_update(buckets)

    def pin(self, index: int, gather: Callable[[Bucket, Tensor], None]) -> None:
        """Makes a sharded parameter whole in memory of its own, until `unpin`.

        Args:
            index: Which.
            gather: (bucket, memory): gathers a bucket there. A collective call.
        """
        bucket = self.bucket_of[index]
        memory = self._pins.get(bucket.name)
        if memory is None:
            memory = torch.empty(bucket.numel, dtype=self._dtypes[bucket.flat], device=self._device)
            self._pins[bucket.name] = memory
        gather(bucket, memory)
        for other in bucket.slots:
            view = parameter_in(memory, self.layout.slots[other], bucket.start)
            self.pinned[other] = view
            unguard(self.all[other])
            self.all[other].data = view
        self._set_versions([self.all[other] for other in bucket.slots], self._version)

    def unpin(self) -> None:
        """Hides what `pin` made whole."""
        if not self.pinned:
            return
        indices = list(self.pinned)
        self.pinned.clear()
        self._pins.clear()
        closed = [index for index in indices if self.layout.slots[index].spec.unit not in self._open]
        self._present([index for index in indices if index not in closed], self._whole)
        for index in closed:
            self.all[index].data = self._whole[index]
        self._hide(closed)

    # ---- updates

    def show_local(self) -> None:
        """Lets parameters be this rank's shards as they are updated, for an optimizer."""
        self.unpin()
        self.take_given()
        for index in self.managed:
            parameter = self.all[index]
            unguard(parameter)
            if not self.is_sharded and self.loses_edits and self._is_moved(index):
                self.refuse_edit(index)
            if self.layout.slots[index].spec.trainable:
                parameter.data = self._local[index]

    def take_given(self) -> None:
        """Takes values of parameters that a loop gave other data outside of `full`, where that counts."""
        if self.loses_edits:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index in self.managed:
                data, whole = self.all[index].data, self._whole[index]
                if data.data_ptr() != whole.data_ptr():
                    whole.copy_(data)

    def local(self, index: int) -> Tensor | None:
        """This rank's shard of a parameter, as it is updated; None where that is the parameter itself."""
        return self._local.get(index)

    def cut(self, index: int, whole: Tensor) -> Tensor:
        """The part of a tensor of a parameter's own shape that goes with this rank's shard of it."""
        local, slot = self._local[index], self.layout.slots[index]
        if self._shards == 1:
            return whole.to(local.dtype)
        start, stop = self._range(index)
        ordered = torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=local.dtype, device=self._device)
        flat = ordered.copy_(whole).as_strided((slot.spec.numel,), (1,))
        return flat[start - slot.offset : stop - slot.offset].clone()

    def updated(self) -> None:
        """The masters have changed: what was gathered is stale, and what is computed with follows them."""
        self.unsharded.forget()
        self._version += 2
        with torch.no_grad():
            for bucket in self.layout.buckets:
                if has_master(self.layout.flats[bucket.flat]):
                    self.shard(bucket).copy_(self.master(bucket))

    def take_as_they_are(self) -> None:
        """Takes parameters as they are now for what an optimizer or the engine made of them."""
        self._edits.set()

    def require_unedited(self) -> None:
        """Refuses to go on with parameters that somebody else changed where that would be lost.

        Raises:
            EngineError: A parameter was edited since `take_as_they_are`.
        """
        edited = self._edited_while_open() if self.is_sharded else self._edits.found()
        if edited is None and self.loses_edits and not self.is_sharded:
            with torch._C.DisableTorchFunctionSubclass():
                edited = next((index for index in self.managed if self._is_moved(index)), None)
        if edited is not None:
            self.refuse_edit(edited)

    def _edited_while_open(self) -> int | None:
        """The index of a gathered parameter that no longer is what its shards are; None where there is none."""
        for unit in self._open:
            for index in self._managed_of.get(unit, ()):
                if index not in self.pinned and self._is_changed(index):
                    return index
        for bucket in self._kept:
            start = self._index * bucket.numel // self._shards
            whole, shard = self.whole(bucket), self.shard(bucket)
            # An edit by way of `p.data` moves no version on; these are small.
            if self._open.issuperset(bucket.units) and not whole.is_cuda:
                changed = whole[start : start + shard.numel()] != shard
                if changed.any() and not shard[changed].isnan().all():
                    return self._at(bucket, start + int(changed.nonzero()[0]))
        return None

    def _at(self, bucket: Bucket, element: int) -> int:
        """The parameter that an element of a bucket belongs to."""
        return max(
            (index for index in bucket.slots if self.layout.slots[index].offset - bucket.start <= element),
            key=lambda index: self.layout.slots[index].offset,
        )

    def refuse_edit(self, index: int) -> None:
        """Says that a parameter cannot be edited where it is.

        Raises:
            EngineError: Always.
        """
        updated = "only its shard of it" if self._shards > 1 else "its master weights, from which it is rounded"
        raise EngineError(
            f"{self.layout.slots[index].spec.name} was edited, but this rank updates {updated}: "
            "edit parameters inside `with pl.full_parameters(model):`, on every rank, then step as usual"
        )

    @property
    def number(self) -> list[int]:
        """Which of how many shards is this rank's."""
        return [self._index, self._shards]

    @property
    def loses_edits(self) -> bool:
        """Whether what is written to parameters outside of `full` does not reach what is updated."""
        return self.is_sharded or self._shared or self.has_masters

    # ---- gathering

    def begin_gather(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        """A gather of a bucket begins: returns what it fills, and this rank's shard where that is not part of it."""
        if not self.is_sharded:
            return self.whole(bucket), None
        displaced = self.unsharded.begin(bucket)
        if displaced is not None:
            # Such as in a checkpoint around several units, which computes them all again before the first backward.
            self.reshard((displaced,))
        return self.whole(bucket), self.shard(bucket)

    @contextmanager
    def full(self, gather: Gather | None, edits: bool = True) -> Iterator[None]:
        """Lets all parameters be whole, as they are updated; what is written to them is kept.

        Args:
            gather: Performs an all-gather; None with one rank.
            edits: Whether they may be written to, so that this rank needs a copy of what others share with it.
        """
        wholes: dict[str, Tensor] = {}
        self.take_given()
        with torch.no_grad():
            for bucket in self.layout.buckets:
                master, other_dtype = self.master(bucket), has_master(self.layout.flats[bucket.flat])
                if self.is_sharded or (other_dtype and self._shards > 1):
                    whole = torch.empty(bucket.numel, dtype=master.dtype, device=self._device)
                    assert gather is not None
                    gather(whole, master, bucket.name)
                    # One bucket at a time on the device.
                    wholes[bucket.name] = whole if edits else whole.cpu()
                elif other_dtype:
                    wholes[bucket.name] = master
                elif self._shared and edits:
                    wholes[bucket.name] = self.whole(bucket).clone()
        self.unpin()
        self._show_full(wholes)
        try:
            yield
        finally:
            if edits:
                self._take_assigned(wholes)
                self._keep_edits(wholes)
            self.rest()
            self._edits.set()

    def _show_full(self, wholes: dict[str, Tensor]) -> None:
        for index in self.managed:
            bucket = self.bucket_of[index]
            whole = wholes.get(bucket.name)
            slot = self.layout.slots[index]
            unguard(self.all[index])
            self.all[index].data = self._whole[index] if whole is None else parameter_in(whole, slot, bucket.start)

    def _take_assigned(self, wholes: dict[str, Tensor]) -> None:
        """Takes values of parameters that were given other data."""
        with torch.no_grad():
            for index in self.managed:
                whole = wholes.get(self.bucket_of[index].name)
                bucket, slot = self.bucket_of[index], self.layout.slots[index]
                view = self._whole[index] if whole is None else parameter_in(whole, slot, bucket.start)
                if self.all[index].data_ptr() != view.data_ptr():
                    view.copy_(self.all[index].data)

    def _keep_edits(self, wholes: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for bucket in self.layout.buckets:
                if (whole := wholes.get(bucket.name)) is not None:
                    size = bucket.numel // self._shards
                    if self._shards > 1:
                        self.master(bucket).copy_(whole[self._index * size : (self._index + 1) * size])
                    if not self.is_sharded and not self._shared:
                        self.whole(bucket).copy_(whole)
        if self.is_sharded or self.has_masters:
            self.updated()

    def leave(self, gather: Gather | None) -> None:
        """Makes every parameter whole and plain, as it is updated, for good. A collective call where sharded."""
        with self.full(gather):
            kept = {index: self.all[index].data for index in self.managed}
        for index in self.managed:
            self.all[index].grad = None
            disown(self.all[index])
            self.all[index].data = kept[index]

    def units_of(self, indices: Collection[int]) -> set[str]:
        """The units that some parameters belong to."""
        return {self.layout.slots[index].spec.unit for index in indices}


def _contents(bucket: Bucket, schedule: Schedule) -> str:
    names = [schedule.layout.slots[index].spec.name for index in bucket.slots]
    return f"{bucket.name} holds {' to '.join(dict.fromkeys((*names[:1], *names[-1:])))}"
