"""Whether somebody else than an optimizer or the engine wrote to parameters where that would be lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
_SAMPLED = 64
"""Elements of a parameter that are compared where comparing all would take too long."""


def refuse_edit(index: int, flat: FlatParameters) -> NoReturn:
    """Says that a parameter cannot be edited where it is.

    Raises:
        EngineError: Always.
    """
    updated = "only its shard of it" if flat.shards > 1 else "its master weights, from which it is rounded"
    raise EngineError(
        f"{flat.layout.slots[index].spec.name} was edited, but this rank updates {updated}: "
        "edit parameters inside `with pl.full_parameters(model):`, on every rank, then step as usual"
    )


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
        self._versions = [self._parameters[index]._version for index in self._indices]
        self._values = [memory[places] for _, memory, places in self._seen]

    def found(self) -> int | None:
        """The index of a parameter that was edited since; None where none was."""
        for index, version in zip(self._indices, self._versions, strict=True):
            if self._parameters[index]._version != version:
                return index
        for (indices, memory, places), values, later in zip(self._seen, self._values, self._later, strict=True):
            # By bits, as NaN is not equal to itself.
            seen, kept = memory[places].view(torch.uint8), values.view(torch.uint8)
            if later is None and torch.equal(seen, kept):
                continue
            changed = (seen != kept).view(len(indices), -1).any(1)
            known = changed if later is None else later.exchange(changed)
            if known is not None and known.any():
                return indices[int(known.nonzero()[0])]
        return None


class CopyEdits:
    """Tells whether somebody wrote to whole copies of sharded buckets, where that would be lost.

    This rank's shard is compared, as an edit by way of `p.data` moves no version on. A GPU's host is told when it asks
    of that bucket the next time.
    """

    def __init__(self, flat: FlatParameters) -> None:
        """Has compared nothing yet."""
        self._flat, self._asks_later = flat, flat.device.type != "cpu"
        self._later: dict[str, ReadLater] = {}
        self._places: dict[str, tuple[list[int], Tensor, Tensor]] = {}
        """By bucket: indices of parameters, and where the elements are that are sampled: in this rank's shard, in the
        whole copy."""
        self._kept: dict[str, Tensor] = {}
        """Those elements of this rank's shard as it rested last, by bucket."""
        self._rounded: Tensor | None = None

    def sampled(self, indices: Collection[int]) -> int | None:
        """The index of a parameter that was written to where its unit is gathered; None where none is seen.

        Of each, elements at even distances are compared, as units are resharded all the time and reading all of them
        would take as long as gathering them; none on GPUs, whose host would wait.

        Args:
            indices: Of parameters, gathered and as they were when they were.
        """
        flat = self._flat
        if self._asks_later:
            return None
        for bucket in {b.name: b for index in indices if (b := flat.bucket_of.get(index)) is not None}.values():
            if bucket.name not in self._places:
                self._places[bucket.name] = self._sample(bucket)
            own, in_shard, in_whole = self._places[bucket.name]
            if (kept := self._kept.get(bucket.name)) is None:
                kept = self._kept[bucket.name] = flat.shard(bucket).index_select(0, in_shard)
            seen = flat.whole(bucket).index_select(0, in_whole)
            if not torch.equal(seen.view(torch.uint8), kept.view(torch.uint8)):
                return own[int(((seen != kept) & ~(seen.isnan() & kept.isnan())).byte().argmax())]
        return None

    def set(self) -> None:
        """Takes this rank's shards as they are from now on: until the next call nobody updates them."""
        self._kept.clear()

    def _sample(self, bucket: Bucket) -> tuple[list[int], Tensor, Tensor]:
        indices, places = [], []
        for index in bucket.slots:
            part = self._flat.own_part(index)
            if part.numel():
                more = _sample(int(part.storage_offset() - self._flat.shard(bucket).storage_offset()), part.numel())
                indices += [index] * len(more)
                places += more
        in_shard = torch.tensor(places, dtype=torch.int64)
        return indices, in_shard, in_shard + self._flat.shard_index * self._flat.shard(bucket).numel()

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
                return self._flat.parameter_at(bucket, start + int(element))
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
                    return flat.parameter_at(bucket, flat.shard_index * own.numel() + first + int(element))
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


def _sample(first: int, numel: int) -> list[int]:
    """Which of some neighbouring elements are compared: at even distances, the first and the last among them."""
    count = min(numel, _SAMPLED)
    return [first + step * (numel - 1) // max(count - 1, 1) for step in range(count)]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors have the same bits, by eight bytes at a time if they can: five times as fast."""
    sizes = (size * each.itemsize for each in (one, other) for size in (each.numel(), int(each.storage_offset())))
    dtype = torch.uint8 if any(size % 8 for size in sizes) else torch.int64
    return torch.equal(one.view(dtype), other.view(dtype))


def _asks_later(memory: Tensor) -> bool:
    return memory.device.type != "cpu"
