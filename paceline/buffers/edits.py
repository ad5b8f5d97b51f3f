"""Whether somebody else than an optimizer or the engine wrote to parameters where that would be lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from paceline.buffers.flat_parameters import FlatParameters
from paceline.comm.read_later import ReadLater
from paceline.core.buffers import has_master
from paceline.core.errors import EngineError
from paceline.core.layout import Bucket

_AT_ONCE = 1 << 18
"""Elements of masters that a CPU rounds at a time to compare them: what stays in its cache."""
_WHOLLY = 1 << 11
"""Elements of a shard up to which comparing all takes no longer than picking some."""
_SAMPLED = 64
"""Elements of a parameter that are compared where comparing all would take too long."""


def refuse_edit(index: int, flat: FlatParameters) -> NoReturn:
    """Says that a parameter cannot be edited where it is.

    Raises:
        EngineError: Always: of its shape if that was changed.
    """
    with torch._C.DisableTorchFunctionSubclass():
        flat.layout.slots[index].spec.require_shape(flat.all[index].shape)
    updated = "only its shard of it" if flat.shards > 1 else "its master weights, from which it is rounded"
    remedy = "edit parameters inside `with pl.full_parameters(model):`, on every rank, then step as usual"
    if flat.is_sharded:
        remedy += "; where a forward of the model's own does it, set strategy.zero to 2 or less"
    if index in flat.renormed:
        remedy = (
            "nn.Embedding(max_norm=...) does that in its forward. Leave max_norm out and scale what is looked up, by "
            "torch.nn.functional.normalize; for edits of the loop, " + remedy
        )
    raise EngineError(f"{flat.layout.slots[index].spec.name} was edited, but this rank updates {updated}: {remedy}")


class Edits:
    """Remembers this rank's shards of parameters as they were left.

    An edit in place moves a tensor's version on. One by way of `p.data` does not, so a few elements of each shard are
    compared too. A GPU's host would have to wait for that: it is told when it asks the next time.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shards: Mapping[int, Tensor]) -> None:
        """Remembers nothing yet.

        Args:
            parameters: All of the model.
            shards: Of some of them, by index: their memory is contiguous, and the engine's for as long as this lives.
        """
        self._parameters, self._indices = parameters, list(shards)
        self._versions: list[int] = []
        self._values: list[Tensor] = []
        self._seen: list[tuple[list[int], Tensor, Tensor]] = []
        """Indices of parameters, the memory that they are in, and where in it the elements are that are compared."""
        found: dict[int, tuple[list[int], Tensor, list[int]]] = {}
        for index, shard in shards.items():
            if shard.numel():
                storage = shard.untyped_storage()
                memory = torch.empty(0, dtype=shard.dtype, device=shard.device).set_(storage)
                indices, _, places = found.setdefault(storage.data_ptr(), ([], memory, []))
                more = _sample(int(shard.storage_offset()), shard.numel())
                indices += [index] * len(more)
                places += more
        self._seen = [
            (indices, memory, torch.tensor(places).to(memory.device)) for indices, memory, places in found.values()
        ]
        self._later = [ReadLater() if _asks_later(memory) else None for _, memory, _ in self._seen]

    def set(self) -> None:
        """Takes the shards as they are now."""
        self._versions = self._read_versions()
        self._values = [memory.index_select(0, places) for _, memory, places in self._seen]

    def found(self) -> int | None:
        """The index of a parameter that was edited since; None where none was."""
        for index, version, now in zip(self._indices, self._versions, self._read_versions(), strict=True):
            if now != version:
                return index
        for (indices, memory, places), values, later in zip(self._seen, self._values, self._later, strict=True):
            # By bits, as NaN is not equal to itself.
            seen, kept = memory.index_select(0, places).view(torch.uint8), values.view(torch.uint8)
            if later is None and torch.equal(seen, kept):
                continue
            changed = (seen != kept).view(len(indices), -1).any(1)
            known = changed if later is None else later.exchange(changed)
            if known is not None and known.any():
                return indices[int(known.nonzero()[0])]
        return None

    def _read_versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [self._parameters[index]._version for index in self._indices]


class CopyEdits:
    """Tells whether somebody wrote to whole copies of sharded buckets, where that would be lost.

    This rank's shard is compared, as an edit by way of `p.data` moves no version on. A GPU's host is told when it asks
    of that bucket the next time.
    """

    def __init__(self, flat: FlatParameters) -> None:
        """Has compared nothing yet."""
        self._flat, self._asks_later = flat, flat.device.type != "cpu"
        self._later: dict[str, ReadLater] = {}
        self._samples: dict[str, _Sample] = {}
        self._samples_of: dict[str, tuple[_Sample, ...]] = {}
        """By unit, as units are resharded all the time."""
        self._rounded: Tensor | None = None

    def sampled(self, unit: str) -> int | None:
        """The index of a parameter that was written to where its unit is gathered; None where none is seen.

        Of a large bucket some elements of each parameter are compared, as reading all of them would take as long as
        gathering them; none on GPUs, whose host would wait.

        Args:
            unit: Has parameters that are gathered and as they were when they were.
        """
        if self._asks_later:
            return None
        if (samples := self._samples_of.get(unit)) is None:
            indices, flat = self._flat.managed_of.get(unit, ()), self._flat
            buckets = {b.name: b for index in indices if (b := flat.bucket_of.get(index)) is not None}
            made = (self._samples.setdefault(name, _Sample(flat, bucket)) for name, bucket in buckets.items())
            samples = self._samples_of[unit] = tuple(made)
        for sample in samples:
            if (element := sample.first_edited()) is not None:
                return self._flat.layout.slot_at(sample.bucket, element)
        return None

    @property
    def made(self) -> tuple[Tensor, ...]:
        """All views of whole copies that are kept here."""
        return tuple(sample.own for sample in self._samples.values())

    def set(self) -> None:
        """Takes this rank's shards as they are from now on: until the next call nobody updates them."""
        for sample in self._samples.values():
            sample.kept = None

    def found(self, copies: Mapping[str, Tensor]) -> int | None:
        """The index of a parameter that a copy has otherwise than this rank's shard; None where there is none.

        Args:
            copies: Of buckets, by name: flat, in the dtype that is computed with.
        """
        for name, whole in copies.items():
            bucket = self._flat.buckets[name]
            shard = self._flat.shard(bucket)
            start = self._flat.shard_index * shard.numel()
            element = self._first_edited(name, whole[start : start + shard.numel()], shard)
            if element is not None and element >= 0:
                return self._flat.layout.slot_at(bucket, start + int(element))
        return None

    def in_rounded(self) -> int | None:
        """The index of a parameter that no longer is its master, rounded; None where there is none.

        All of this rank's shards are compared, up to zero 2, where they are part of what is computed with.
        """
        flat = self._flat
        for name, bucket in flat.buckets.items():
            if not has_master(flat.layout.flats[bucket.flat]):
                continue
            own, master = flat.shard(bucket), flat.master(bucket)
            # A GPU is busy with a bucket at once; in pieces its host would be too slow.
            size = max(own.numel(), 1) if _asks_later(own) else _AT_ONCE
            for first in range(0, own.numel(), size):
                part = own[first : first + size]
                rounded = self._memory_like(part).copy_(master[first : first + size])
                element = self._first_edited(f"{name} from {first}", part, rounded)
                if element is not None and element >= 0:
                    return flat.layout.slot_at(bucket, flat.shard_index * own.numel() + first + int(element))
        return None

    def _memory_like(self, part: Tensor) -> Tensor:
        if self._rounded is None or self._rounded.numel() < part.numel():
            self._rounded = torch.empty_like(part)
        return self._rounded[: part.numel()]

    def _first_edited(self, name: str, own: Tensor, shard: Tensor) -> Tensor | None:
        """The first element that differs: 0-dim, int64, -1 where none does; None where that is not known yet."""
        later = _asks_later(own)
        if not later and _same_bits(own, shard):
            return None
        changed = (own != shard) & ~(own.isnan() & shard.isnan())
        first = torch.where(changed.any(), changed.byte().argmax(), -1)
        return self._later.setdefault(name, ReadLater()).exchange(first) if later else first


class _Sample:
    """Elements of a bucket that are compared between what was gathered of it and this rank's shard: by their bits.

    Attributes:
        bucket: See above.
        own: This rank's part of what was gathered.
        kept: Those that are not compared where they lie, as they are in the shard.
    """

    def __init__(self, flat: FlatParameters, bucket: Bucket) -> None:
        """Of where a bucket lies for as long as units have the slots that they have now."""
        self.bucket = bucket
        self.kept: Tensor | None = None
        shard = flat.shard(bucket)
        self._first = flat.shard_index * shard.numel()
        self._shard = _as_integers(shard)
        self.own = _as_integers(flat.whole(bucket)[self._first : self._first + shard.numel()])
        self._per = max(1, self._shard.numel() // max(1, shard.numel()))
        self._places: Tensor | None = None
        if shard.numel() > _WHOLLY:
            parts = [part for index in bucket.slots if (part := flat.own_part(index)).numel()]
            starts = (int(part.storage_offset() - shard.storage_offset()) for part in parts)
            found = [place for start, part in zip(starts, parts, strict=True) for place in _sample(start, part.numel())]
            words = [self._per * place + word for place in found for word in range(self._per)]
            self._places = torch.tensor(words, dtype=torch.int64)

    def first_edited(self) -> int | None:
        """The first element of the bucket that was edited where it was gathered; None where none of these was."""
        if self._places is None:
            seen, kept = self.own, self._shard
        else:
            if self.kept is None:
                self.kept = self._shard.index_select(0, self._places)
            seen, kept = self.own.index_select(0, self._places), self.kept
        if torch.equal(seen, kept):
            return None
        place = int((seen != kept).byte().argmax())
        return self._first + (place if self._places is None else int(self._places[place])) // self._per


def _as_integers(values: Tensor) -> Tensor:
    """The memory of elements as integers as long as they are, or of 8 bytes."""
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(values.itemsize, torch.int64))


def _sample(first: int, numel: int) -> list[int]:
    """Returns the positions of the elements compared, of `numel` in a row: evenly spaced, first and last included."""
    count = min(numel, _SAMPLED)
    return [first + step * (numel - 1) // max(count - 1, 1) for step in range(count)]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors have the same bits, by eight bytes at a time if they can: five times as fast."""
    sizes = (size * each.itemsize for each in (one, other) for size in (each.numel(), int(each.storage_offset())))
    dtype = torch.uint8 if any(size % 8 for size in sizes) else torch.int64
    return torch.equal(one.view(dtype), other.view(dtype))


def _asks_later(memory: Tensor) -> bool:
    return memory.device.type != "cpu"


class StateEdits:
    """Tells whether somebody wrote to what `state_dict` gave, where that is a copy which nobody would read.

    As each is made by `detach`, such a write moves the parameter's version on. It is seen until the engine sets
    versions itself, as when parameters are gathered again.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Has given nothing yet."""
        self._parameters, self._versions = parameters, dict[int, int]()

    def set(self, indices: Sequence[int]) -> None:
        """Notes that these parameters were given, and are untouched."""
        self._versions = dict(zip(indices, self._read(indices), strict=True))

    def found(self) -> int | None:
        """The index of one that was written to; None where none was. It asks once."""
        given, self._versions = self._versions, {}
        now = zip(given, self._read(list(given)), strict=True)
        return next((index for index, version in now if version != given[index]), None)

    def forget(self) -> None:
        """What was written counts after all, or can no longer be seen."""
        self._versions = {}

    def _read(self, indices: Sequence[int]) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [self._parameters[index]._version for index in indices]
