"""Where each parameter sits: parameters -> units -> flat buffers -> buckets.

Pure: a function of names, shapes, dtypes and the world size. Nothing here holds a tensor, so the layout
of a 70B model on the meta device costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.strategy import Strategy

ALIGNMENT = 64
"""Bytes to which every parameter's place is aligned, so that vector loads never straddle a cache line."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the layout needs to know of one parameter."""

    name: str
    """Fully qualified name, as in `state_dict`."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Strides in elements, kept by the view into the flat buffer (channels-last weights stay so)."""
    dtype: str
    """Name of the dtype without its module: "float32", "bfloat16"."""
    itemsize: int
    """Bytes per element."""
    unit: str
    """Name of the unit that the parameter belongs to."""
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 for an empty parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter: elements [offset, offset + numel) of flat buffer `flat`."""

    spec: ParameterSpec
    flat: int
    offset: int

    @property
    def stop(self) -> int:
        """First element after the parameter."""
        return self.offset + self.spec.numel


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat buffer: all parameters of one dtype that are all trainable or all frozen."""

    dtype: str
    itemsize: int
    trainable: bool
    numel: int
    """Elements, padding included."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A contiguous range of a flat buffer that one collective reduces."""

    name: str
    flat: int
    start: int
    stop: int
    slots: tuple[int, ...]
    """Indices into `Layout.slots`."""
    units: tuple[str, ...]
    """Units that contribute gradients, in the order of the forward pass."""
    itemsize: int

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start

    @property
    def bytes(self) -> int:
        """Size in bytes, padding included."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Layout:
    """Every parameter's place, and the buckets that gradients are reduced in.

    Attributes:
        units: Unit names in the order of the forward pass.
        slots: One place per parameter.
        flats: The flat buffers.
        buckets: In the order in which backward completes them: the last layers first.
    """

    units: tuple[str, ...]
    slots: tuple[Slot, ...]
    flats: tuple[Flat, ...]
    buckets: tuple[Bucket, ...]

    def slots_of(self, unit: str) -> tuple[int, ...]:
        """Indices of the slots of one unit."""
        return tuple(index for index, slot in enumerate(self.slots) if slot.spec.unit == unit)

    @property
    def padding_bytes(self) -> int:
        """Bytes of the trainable flat buffers that hold no parameter."""
        total = sum(flat.numel * flat.itemsize for flat in self.flats if flat.trainable)
        return total - sum(slot.spec.numel * slot.spec.itemsize for slot in self.slots if slot.spec.trainable)


def build_layout(
    parameters: Sequence[ParameterSpec], units: Sequence[str], strategy: Strategy, world_size: int
) -> Layout:
    """Lays parameters out in flat buffers and cuts these into buckets.

    Flat buffers run from the last unit of the forward pass to the first, so that a bucket is a contiguous
    range that backward completes early. Each place is aligned to `ALIGNMENT` bytes and each bucket is padded
    to `world_size` equal, aligned shards.

    Args:
        parameters: In registration order, each parameter once (tied parameters have one name).
        units: Unit names in the order of the forward pass.
        strategy: Gives packing and bucket size.
        world_size: Number of ranks.

    Raises:
        ValueError: A parameter names an unknown unit, or a name occurs twice.
    """
    position = {name: index for index, name in enumerate(units)}
    names: set[str] = set()
    for spec in parameters:
        if spec.unit not in position:
            raise ValueError(f"parameter {spec.name} belongs to unit {spec.unit!r}, which is not in {list(units)}")
        if spec.name in names:
            raise ValueError(f"parameter {spec.name} occurs twice")
        names.add(spec.name)

    slots: list[Slot] = []
    flats: list[Flat] = []
    buckets: list[Bucket] = []
    for dtype, itemsize, trainable in _kinds(parameters):
        members = [s for s in parameters if (s.dtype, s.trainable) == (dtype, trainable)]
        # sorted() is stable: within a unit, registration order.
        members.sort(key=lambda spec: -position[spec.unit])
        align = ALIGNMENT // itemsize
        packs = _pack(members, strategy, itemsize, align) if trainable else [members]
        offset = 0
        for pack in packs:
            start, indices = offset, []
            for spec in pack:
                indices.append(len(slots))
                slots.append(Slot(spec, len(flats), offset))
                offset = _round_up(offset + spec.numel, align)
            offset = start + _round_up(offset - start, align * world_size)
            if trainable and offset > start:
                in_bucket = sorted({spec.unit for spec in pack}, key=position.__getitem__)
                buckets.append(Bucket("", len(flats), start, offset, tuple(indices), tuple(in_bucket), itemsize))
        flats.append(Flat(dtype, itemsize, trainable, offset))

    # A bucket is complete when the earliest of its units has gone backward.
    buckets.sort(key=lambda bucket: -position[bucket.units[0]])
    named = tuple(
        Bucket(f"bucket {i}", b.flat, b.start, b.stop, b.slots, b.units, b.itemsize) for i, b in enumerate(buckets)
    )
    return Layout(tuple(units), tuple(slots), tuple(flats), named)


def _kinds(parameters: Iterable[ParameterSpec]) -> list[tuple[str, int, bool]]:
    """The distinct (dtype, itemsize, trainable) in order of first appearance."""
    return list(dict.fromkeys((spec.dtype, spec.itemsize, spec.trainable) for spec in parameters))


def _pack(members: Sequence[ParameterSpec], strategy: Strategy, itemsize: int, align: int) -> list[list[ParameterSpec]]:
    """Cuts an ordered list of parameters into those that share a bucket."""
    if strategy.packing == "flat":
        return [list(members)]
    if strategy.packing == "parameter":
        return [[spec] for spec in members]
    packs: list[list[ParameterSpec]] = []
    filled = 0
    for spec in members:
        size = _round_up(spec.numel, align) * itemsize
        if not packs or filled + size > strategy.bucket_bytes:
            packs.append([])
            filled = 0
        packs[-1].append(spec)
        filled += size
    return packs


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
