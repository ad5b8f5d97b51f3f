"""Where a model's parameters lie: in flat buffers, whole to compute with and as this rank's shards to update."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from paceline.buffers.former_memory import FormerMemory
from paceline.buffers.handed_out import HandedOut
from paceline.buffers.memory import Tensors, parameter_in
from paceline.core.buffers import Buffers, has_master
from paceline.core.errors import EngineError
from paceline.core.layout import Bucket, Flat
from paceline.core.schedule import Schedule
from paceline.tensors.division import Division, Gather


class FlatParameters:
    """The flat buffers of parameters, and the views of them that stand for one parameter each.

    Attributes:
        all: The user's parameter objects, in the order of `layout.slots`.
        index_of: The index of each by its `id()`.
        layout: Where they lie.
        buckets: By name.
        bucket_of: The bucket that a parameter is in, by index; none for those that are neither updated nor sharded.
        contents: Which parameters a bucket holds, in words, by its name.
        managed: Indices of those whose data changes: sharded, updated in another dtype, or by another rank.
        is_sharded: Whether a rank keeps only shards to compute with, as at zero 3.
        shares_memory: Whether ranks compute with the same parameters in shared memory.
        has_masters: Whether some are updated in another dtype than they are computed with in.
        has_followers: Whether some ranks keep parameters that only others update.
        shards: How many shards a bucket has.
        shard_index: Which of them is this rank's.
        views: Each parameter whole, to compute with, where that is gathered.
        local: This rank's shard of each managed one, as it is updated.
        cuts: A checksum of which elements of each managed one these are.
        former: Where they lay before or for a while, as far as a loop has tensors there.
        renormed: Indices of those that their own modules write to in forward, for `max_norm`.
        gather_shards: See `Division.gather`.
    """

    def __init__(
        self,
        schedule: Schedule,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        tensors: Tensors,
        turns: Iterable[Iterable[nn.Parameter]] | None,
    ) -> None:
        """Copies parameters into flat buffers: see `Parameters`."""
        self.all = list(parameters)
        self.index_of = {id(parameter): index for index, parameter in enumerate(self.all)}
        self.layout = layout = schedule.layout
        self.renormed: set[int] = set()
        self.buckets = {bucket.name: bucket for bucket in layout.buckets}
        self.contents = {bucket.name: _contents(bucket, schedule) for bucket in layout.buckets}
        self.bucket_of = {index: bucket for bucket in layout.buckets for index in bucket.slots}
        self.device, self._tensors = device, tensors
        self._buffers: Buffers = schedule.buffers()
        self.shards, self.shard_index = schedule.shards, schedule.shard_index
        self.is_sharded, self.shares_memory = schedule.shards_parameters, schedule.shares_memory
        self.has_followers = schedule.has_followers
        self._wholes: dict[str, Tensor] = {}
        self._own_shards: dict[str, Tensor] = {}
        self._dtypes: list[torch.dtype] = [getattr(torch, flat.dtype) for flat in layout.flats]
        self.has_masters = any(has_master(flat) for flat in layout.flats)
        follows = turns is None and not self.is_sharded
        moved = {index: self.all[index] for index in self.bucket_of if follows and self._is_managed(index)}
        self.former = FormerMemory(moved, [slot.spec.name for slot in layout.slots], self.contents)
        # Those that no other rank reaches stay where they are, as a loop may have tensors there.
        self._staying = {
            index
            for index, flat in enumerate(layout.flats)
            if turns is None and self._buffers.by_name[_name(index)].stream is None and self._may_stay(index, flat)
        }
        left = {_name(index) for index in self._staying}
        tensors.allocate([buffer for buffer in self._buffers if buffer.name not in left], "parameters", "master")
        with torch.no_grad():
            for whole in turns if turns is not None else (self.all,):
                for parameter in whole:
                    self._take(self.index_of[id(parameter)])
        self.local = {index: self._local_view(index) for index in self.bucket_of if self._is_managed(index)}
        self.managed = sorted(self.local)
        places = ((layout.slots[index], *self._range_of(index)) for index in self.managed)
        cuts = [(slot.spec.numel, start - slot.offset, stop - slot.offset) for slot, start, stop in places]
        self.cuts = zlib.crc32(repr(cuts).encode())
        self.managed_of: dict[str, list[int]] = {}
        """Indices of managed parameters by the unit that they belong to."""
        for index in self.managed:
            self.managed_of.setdefault(layout.slots[index].spec.unit, []).append(index)
        self._divisions: dict[int, Division] = {}
        self.gather_shards: Callable[[], Gather | None] = lambda: None
        self._handed_out, self._own_uses = HandedOut(), 0
        self.views: list[Tensor] = []
        self.assign_slots(schedule)
        for parameter, whole in zip(self.all, self.views, strict=True):
            parameter.data = whole
        self.former.move_views(self.all)

    def _may_stay(self, index: int, flat: Flat) -> bool:
        """Whether the parameters of a flat buffer can be computed with and updated where they are."""
        slots = zip(self.all, self.layout.slots, strict=True)
        own = [(p, slot.spec) for p, slot in slots if slot.flat == index]
        as_laid_out = all(p.stride() == spec.stride and str(p.dtype) == f"torch.{flat.dtype}" for p, spec in own)
        return as_laid_out and not has_master(flat) and not any(p.is_inference() for p, _ in own)

    def _is_managed(self, index: int) -> bool:
        flat = self.layout.flats[self.layout.slots[index].flat]
        return self.shards > 1 or has_master(flat) or self.has_followers

    def whole(self, bucket: Bucket) -> Tensor:
        """All parameters of a bucket, flat, to compute with."""
        if (found := self._wholes.get(bucket.name)) is None:
            found = self._wholes[bucket.name] = self._tensors.typed(self._buffers.unsharded(bucket), self.dtype(bucket))
        return found

    def shard(self, bucket: Bucket) -> Tensor:
        """This rank's shard of a bucket's parameters, flat, in the dtype that is computed with."""
        if (found := self._own_shards.get(bucket.name)) is None:
            found = self._own_shards[bucket.name] = self._tensors[self._buffers.shard(bucket)]
        return found

    def master(self, bucket: Bucket) -> Tensor:
        """This rank's shard of a bucket's parameters, flat, as they are updated."""
        return self._tensors[self._buffers.master(bucket)]

    def dtype(self, bucket: Bucket) -> torch.dtype:
        """Returns the dtype in which a bucket's parameters are computed with."""
        return self._dtypes[bucket.flat]

    def assign_slots(self, schedule: Schedule) -> None:
        """Gives gathered units their slots, which the order they run in decides."""
        self._buffers = schedule.buffers()
        self._tensors.allocate(self._buffers, "unsharded")
        self._wholes.clear()
        self.views = [self._whole_view(index) for index in range(len(self.layout.slots))]
        self._views_of: dict[str, dict[str, Tensor]] = {}

    def _range_of(self, index: int) -> tuple[int, int]:
        """The elements of its flat buffer that are this rank's of a parameter."""
        return self.layout.shard_of(self.bucket_of[index], index, self.shard_index, self.shards)

    def division(self, index: int) -> Division:
        """Returns the elements of a managed parameter, in the order of memory, that each rank has."""
        found = self._divisions.get(index)
        if found is None:
            slot, bucket = self.layout.slots[index], self.bucket_of[index]
            ranges = (self.layout.shard_of(bucket, index, each, self.shards) for each in range(self.shards))
            parts = tuple((start - slot.offset, stop - slot.offset) if start < stop else () for start, stop in ranges)
            found = self._divisions[index] = Division(
                slot.spec.name, slot.spec.shape, slot.spec.stride, parts, self.gather_shards, parts[self.shard_index]
            )
        return found

    def _take(self, index: int) -> None:
        """Copies a parameter that is whole to where it, or this rank's shard of it, lies from now on."""
        slot, values = self.layout.slots[index], self.all[index].detach()
        spec = slot.spec
        if slot.flat in self._staying:
            return
        if values.stride() != spec.stride:
            dense = torch.empty_strided(spec.shape, spec.stride, dtype=values.dtype, device=values.device)
            values = dense.copy_(values)
        values = values.as_strided((spec.numel,), (1,))
        bucket = self.bucket_of.get(index)
        if not self.is_sharded:
            self._tensors.by_name[_name(slot.flat)][slot.offset : slot.stop].copy_(values)
        if bucket is None:
            return
        start, stop = self._range_of(index)
        if start < stop and (self.is_sharded or has_master(self.layout.flats[slot.flat])):
            for target in {id(t): t for t in (self.shard(bucket), self.master(bucket))}.values():
                self._part(index, target).copy_(values[start - slot.offset : stop - slot.offset])

    def _local_view(self, index: int) -> Tensor:
        slot, bucket = self.layout.slots[index], self.bucket_of[index]
        if self.shards == 1:
            return parameter_in(self.master(bucket), slot, bucket.start)
        return self._part(index, self.master(bucket))

    def own_part(self, index: int) -> Tensor:
        """Returns this rank's shard of a parameter, flat, in the dtype that is computed with."""
        return self._part(index, self.shard(self.bucket_of[index]))

    def _part(self, index: int, shard: Tensor) -> Tensor:
        """Returns the part of a parameter in this rank's shard of its bucket."""
        start, stop = self._range_of(index)
        first = self.bucket_of[index].shard(self.shard_index, self.shards)[0]
        return shard[start - first : stop - first]

    def _whole_view(self, index: int) -> Tensor:
        slot, bucket = self.layout.slots[index], self.bucket_of.get(index)
        if slot.flat in self._staying:
            return self.all[index].data
        if not self.is_sharded:
            name = _name(slot.flat)
            whole = self._tensors.by_name[name]
            view = parameter_in(whole, slot, 0)
            return self._handed_out.view(name, whole, view) if self.shards > 1 or self.has_followers else view
        if bucket is None:
            # It has no elements.
            return torch.empty_strided(
                slot.spec.shape, slot.spec.stride, dtype=self._dtypes[slot.flat], device=self.device
            )
        return parameter_in(self.whole(bucket), slot, bucket.start)

    def views_of(self, unit: str) -> dict[str, Tensor]:
        """Where a gathered unit's parameters are for now, by name."""
        if unit not in self._views_of:
            own = self.managed_of.get(unit, ())
            self._views_of[unit] = {self.layout.slots[index].spec.name: self.views[index] for index in own}
        return self._views_of[unit]

    @property
    def made(self) -> tuple[Tensor, ...]:
        """All tensors over these buffers that are kept for as long as they are."""
        return (*self._tensors.made, *self.views, *self._wholes.values(), *self._own_shards.values())

    def cut(self, index: int, whole: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The part of what has a parameter's own shape that goes with this rank's shard of it, as wide by default."""
        dtype, slot = dtype or self.local[index].dtype, self.layout.slots[index]
        if self.shards == 1:
            return whole.to(dtype)
        start, stop = self._range_of(index)
        ordered = torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=dtype, device=self.device)
        flat = ordered.copy_(whole).as_strided((slot.spec.numel,), (1,))
        return flat[start - slot.offset : stop - slot.offset].clone()

    def round_masters(self) -> None:
        """The masters have changed: this rank's shards of what is computed with follow them."""
        with torch.no_grad():
            for bucket in self.layout.buckets:
                if has_master(self.layout.flats[bucket.flat]):
                    self.shard(bucket).copy_(self.master(bucket))

    def _uses(self) -> int:
        return sum(self._handed_out.uses(_name(index)) for index in range(len(self.layout.flats)))

    def count_own_uses(self) -> None:
        """Takes the tensors that now are in the memory of parameters for the engine's own."""
        self._own_uses = self._uses()

    @property
    def has_aliases(self) -> bool:
        """Whether a loop has tensors in the memory of parameters, reading which nobody is asked.

        To be asked where parameters rest.
        """
        return bool(self.former) or self.is_used_beside(0)

    def is_used_beside(self, moved: int) -> bool:
        """Whether others have tensors in these buffers, where so many resting parameters are elsewhere."""
        return self._uses() + moved > self._own_uses

    def require_in_place(self) -> None:
        """Refuses to go on where parameters were moved out of the buffers that are updated and sent.

        Raises:
            EngineError: They were.
        """
        if self._handed_out.is_moved:
            raise EngineError(
                "the model's parameters were moved to other memory, as model.share_memory() does, where updates do not "
                "reach them: share a copy of the model, made and copied to inside `with pl.full_parameters(model):`, "
                "or the model itself after pl.release(model)"
            )

    def require_shapes(self) -> None:
        """Refuses to go on with parameters that were given another shape.

        Raises:
            EngineError: One was.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, slot in zip(self.all, self.layout.slots, strict=True):
                if parameter.shape != slot.spec.shape:
                    slot.spec.require_shape(parameter.shape)

    @property
    def number(self) -> list[int]:
        """The index of this rank's shards, and the number of shards."""
        return [self.shard_index, self.shards]

    def units_of(self, indices: Collection[int]) -> set[str]:
        """The units that some parameters belong to."""
        return {self.layout.slots[index].spec.unit for index in indices}


def _name(flat: int) -> str:
    """The buffer of what is computed with of a flat buffer's parameters."""
    return f"parameters {flat}"


def _contents(bucket: Bucket, schedule: Schedule) -> str:
    names = [schedule.layout.slots[index].spec.name for index in bucket.slots]
    return f"{bucket.name} holds {' to '.join(dict.fromkeys((*names[:1], *names[-1:])))}"
