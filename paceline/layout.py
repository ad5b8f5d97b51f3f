"""Where each parameter sits: parameters -> units -> flat buffers -> buckets.

Pure: a function of names, shapes, dtypes and the world size. Nothing here holds a tensor, so the layout
of a 70B model on the meta device costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.strategy import Strategy

ROOT = "(root)"
"""Name of the unit of parameters that no single unit holds: of the model itself, or shared by several units."""

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
    """One flat buffer: all parameters of one dtype that are all trainable or all frozen.

    Dtypes are names without their module, as in `ParameterSpec`.
    """

    dtype: str
    """What the parameters are computed with in."""
    itemsize: int
    trainable: bool
    numel: int
    """Elements, padding included."""
    master: str
    """The parameters' own dtype, in which they are updated; other than `dtype` under low precision."""
    master_itemsize: int
    gradient: str
    """What gradients are collected, sent and reduced in."""
    gradient_itemsize: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A contiguous range of a flat buffer: what one collective gathers or reduces."""

    name: str
    flat: int
    start: int
    stop: int
    slots: tuple[int, ...]
    """Indices into `Layout.slots`."""
    units: tuple[str, ...]
    """Units whose parameters it holds, in the order of the forward pass."""
    itemsize: int
    """Bytes of a parameter's element."""
    gradient_itemsize: int
    trainable: bool = True
    resident: bool = False
    """Whether its parameters, once gathered, stay so for the whole step: shared by units, of no unit, or small."""

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start

    @property
    def bytes(self) -> int:
        """Size of its parameters in bytes, padding included."""
        return self.numel * self.itemsize

    def shard(self, index: int, shards: int) -> tuple[int, int]:
        """Range of the flat buffer that is the `index`-th of `shards` equal parts."""
        size = self.numel // shards
        return self.start + index * size, self.start + (index + 1) * size


@dataclass(frozen=True)
class Layout:
    """Every parameter's place, and the buckets that move together.

    Attributes:
        units: Unit names in the order of the forward pass.
        slots: One place per parameter.
        flats: The flat buffers.
        buckets: In the order in which backward completes them: the last layers first. Frozen parameters are in
            buckets only where they are sharded.
    """

    units: tuple[str, ...]
    slots: tuple[Slot, ...]
    flats: tuple[Flat, ...]
    buckets: tuple[Bucket, ...]

    def slots_of(self, unit: str) -> tuple[int, ...]:
        """Indices of the slots of one unit."""
        return tuple(index for index, slot in enumerate(self.slots) if slot.spec.unit == unit)

    def piece(self, bucket: Bucket, slot: int, index: int, shards: int) -> tuple[int, int]:
        """The part of a parameter that lies in the `index`-th of `shards` shards of its bucket.

        Returns:
            Elements [start, stop) of its flat buffer; empty (start = stop) where it lies elsewhere.
        """
        first, last = bucket.shard(index, shards)
        place = self.slots[slot]
        start = min(max(place.offset, first), last)
        return start, max(start, min(place.stop, last))

    @property
    def padding_bytes(self) -> int:
        """Bytes of the trainable flat buffers that hold no parameter."""
        total = sum(flat.numel * flat.itemsize for flat in self.flats if flat.trainable)
        held = (s.spec.numel * self.flats[s.flat].itemsize for s in self.slots if s.spec.trainable)
        return total - sum(held)


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
        strategy: Gives stage, packing, bucket size and precision.
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

    resident = _resident_units(parameters, strategy)
    slots: list[Slot] = []
    flats: list[Flat] = []
    buckets: list[Bucket] = []
    for dtype, itemsize, trainable in _kinds(parameters):
        members = [s for s in parameters if (s.dtype, s.trainable) == (dtype, trainable)]
        # sorted() is stable: within a unit, registration order.
        members.sort(key=lambda spec: (spec.unit in resident, -position[spec.unit]))
        flat = _flat(dtype, itemsize, trainable, strategy)
        align = ALIGNMENT // min(flat.itemsize, flat.gradient_itemsize)
        packs = _pack(members, strategy, flat.gradient_itemsize, align, resident)
        offset = 0
        for pack in packs if trainable or strategy.gathers else [members]:
            start, indices = offset, []
            for spec in pack:
                indices.append(len(slots))
                slots.append(Slot(spec, len(flats), offset))
                offset = _round_up(offset + spec.numel, align)
            offset = start + _round_up(offset - start, align * world_size)
            if offset > start and (trainable or strategy.gathers):
                in_bucket = tuple(sorted({spec.unit for spec in pack}, key=position.__getitem__))
                buckets.append(
                    Bucket(
                        name=f"{'(resident)' if in_bucket[0] in resident else in_bucket[0]}"
                        f"{'' if len(_kinds(parameters)) == 1 else f' {dtype}'}{'' if trainable else ' frozen'}",
                        flat=len(flats),
                        start=start,
                        stop=offset,
                        slots=tuple(indices),
                        units=in_bucket,
                        itemsize=flat.itemsize,
                        gradient_itemsize=flat.gradient_itemsize,
                        trainable=trainable,
                        resident=in_bucket[0] in resident,
                    )
                )
        flats.append(replace(flat, numel=offset))

    # A bucket is complete when the earliest of its units has gone backward.
    buckets.sort(key=lambda bucket: (bucket.resident, -position[bucket.units[0]]))
    if not strategy.gathers:
        # There a bucket may hold several units, or a part of one.
        buckets = [replace(bucket, name=f"bucket {index}") for index, bucket in enumerate(buckets)]
    return Layout(tuple(units), tuple(slots), tuple(flats), tuple(buckets))


def _resident_units(parameters: Sequence[ParameterSpec], strategy: Strategy) -> frozenset[str]:
    """Units of sharded parameters that are gathered once a step: those of no module, and the smallest.

    A collective costs its latency however small it is, so units are kept that together are at most an eighth of the
    largest.
    """
    if not strategy.gathers:
        return frozenset()
    sizes: dict[str, int] = {}
    for spec in parameters:
        sizes[spec.unit] = sizes.get(spec.unit, 0) + spec.numel * spec.itemsize
    room = max(sizes.values(), default=0) // 8
    kept = {ROOT} & sizes.keys()
    # In registration order among equals, so that all ranks choose the same.
    for unit in sorted((unit for unit in sizes if unit not in kept), key=sizes.__getitem__):
        room -= sizes[unit]
        if room < 0:
            break
        kept.add(unit)
    return frozenset(kept)


def _kinds(parameters: Iterable[ParameterSpec]) -> list[tuple[str, int, bool]]:
    """The distinct (dtype, itemsize, trainable) in order of first appearance."""
    return list(dict.fromkeys((spec.dtype, spec.itemsize, spec.trainable) for spec in parameters))


def _flat(dtype: str, itemsize: int, trainable: bool, strategy: Strategy) -> Flat:
    """An empty flat buffer for parameters of one kind."""
    if not strategy.low or dtype not in ("float32", "bfloat16", "float16"):
        return Flat(dtype, itemsize, trainable, 0, dtype, itemsize, dtype, itemsize)
    low, wide = (strategy.precision, 2), ("float32", 4)
    gradient = wide if strategy.reduce_in_float32 else low
    # What is not updated needs no master.
    return Flat(*low, trainable, 0, *(wide if trainable else low), *gradient)


def _pack(
    members: Sequence[ParameterSpec], strategy: Strategy, itemsize: int, align: int, resident: frozenset[str]
) -> list[list[ParameterSpec]]:
    """Cuts an ordered list of parameters into those that share a bucket."""
    if strategy.packing == "flat":
        return [list(members)]
    if strategy.packing == "parameter":
        return [[spec] for spec in members]
    packs: list[list[ParameterSpec]] = []
    filled, last = 0, ""
    for pieces in _together(members, strategy, resident):
        size = sum(_round_up(spec.numel, align) for spec in pieces) * itemsize
        unit = pieces[0].unit
        # A unit's parameters are gathered for it alone.
        apart = strategy.gathers and not (unit in resident and last in resident)
        if not packs or apart or (not strategy.gathers and filled + size > strategy.bucket_bytes):
            packs.append([])
            filled = 0
        packs[-1] += pieces
        filled += size
        last = unit
    return packs


def _together(
    members: Sequence[ParameterSpec], strategy: Strategy, resident: frozenset[str]
) -> list[list[ParameterSpec]]:
    """What must not be cut: parameters, or from stage 2 on units, whose gradients share a buffer's lifetime."""
    if strategy.stage < 2:
        return [[spec] for spec in members]
    units = dict.fromkeys(spec.unit for spec in members)
    return [[spec for spec in members if spec.unit == unit] for unit in units]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
