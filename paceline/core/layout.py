"""Where each parameter sits: parameters -> units -> flat buffers -> buckets.

Pure: a function of names, shapes, dtypes and the world size. Nothing here holds a tensor, so the layout
of a 70B model on the meta device costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.core.strategy import Strategy

ROOT = "(root)"
"""Name of the unit of parameters that no single unit holds: of the model itself, or shared by several units."""

ALIGNMENT = 64
"""Bytes to which every parameter's place is aligned, so that vector loads never straddle a cache line."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the layout needs to know of one parameter.

    Attributes:
        name: Fully qualified name, as in `state_dict`.
        shape: Its whole shape.
        stride: Strides in elements, kept by the view into the flat buffer (channels-last weights stay so).
        dtype: Name of the dtype without its module: "float32", "bfloat16".
        itemsize: Bytes per element.
        unit: Name of the unit that the parameter belongs to.
        trainable: Whether it gets gradients.
        casts: Whether low precision computes with it in that precision; else with the parameter as it is.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int
    unit: str
    trainable: bool = True
    casts: bool = True

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 for an empty parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter: elements [offset, offset + numel) of flat buffer `flat`.

    Attributes:
        spec: The parameter.
        flat: Index of the flat buffer.
        offset: First element.
    """

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

    Attributes:
        dtype: What the parameters are computed with in.
        itemsize: Bytes of such an element.
        trainable: Whether its parameters get gradients.
        numel: Elements, padding included.
        master: The parameters' own dtype, in which they are updated; other than `dtype` under low precision.
        master_itemsize: Bytes of such an element.
        gradient: What gradients are copied to, sent and reduced in.
        gradient_itemsize: Bytes of such an element.
    """

    dtype: str
    itemsize: int
    trainable: bool
    numel: int
    master: str
    master_itemsize: int
    gradient: str
    gradient_itemsize: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A contiguous range of a flat buffer: what one collective gathers or reduces.

    Attributes:
        name: Of its unit, or its number.
        flat: Index of the flat buffer.
        start: First element.
        stop: First element after it.
        slots: Indices into `Layout.slots`.
        units: Units whose parameters it holds, in the order of the forward pass.
        itemsize: Bytes of a parameter's element.
        gradient_itemsize: Bytes of a gradient's element.
        trainable: Whether its parameters get gradients.
        kept: Whether its parameters, once gathered, stay so for the whole step: shared by units, of no unit, or small.
    """

    name: str
    flat: int
    start: int
    stop: int
    slots: tuple[int, ...]
    units: tuple[str, ...]
    itemsize: int
    gradient_itemsize: int
    trainable: bool = True
    kept: bool = False

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
    """Every parameter's place, and the buckets that move together: `pl.engine_of(model).layout`.

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

    def shard_of(self, bucket: Bucket, slot: int, index: int, shards: int) -> tuple[int, int]:
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

    Example:
        >>> from paceline.core.layout import ParameterSpec
        >>> weight = ParameterSpec("weight", (100, 10), (10, 1), "float32", itemsize=4, unit="(root)")
        >>> layout = pl.build_layout([weight], ["(root)"], pl.Strategy(), world_size=8)
        >>> [(bucket.name, bucket.numel) for bucket in layout.buckets]
        [('bucket 0', 1024)]
    """
    position = {name: index for index, name in enumerate(units)}
    names: set[str] = set()
    for spec in parameters:
        if spec.unit not in position:
            raise ValueError(f"parameter {spec.name} belongs to unit {spec.unit!r}, which is not in {list(units)}")
        if spec.name in names:
            raise ValueError(f"parameter {spec.name} occurs twice")
        names.add(spec.name)

    kept = _kept_units(parameters, strategy)
    slots: list[Slot] = []
    flats: list[Flat] = []
    buckets: list[Bucket] = []
    kinds = _kinds(parameters, strategy)
    for (_, trainable, _), members in kinds.items():
        # sorted() is stable: within a unit, registration order.
        members.sort(key=lambda spec: (spec.unit in kept, -position[spec.unit]))
        flat = _flat(members[0], strategy)
        kind = "" if len(kinds) == 1 else f" {members[0].dtype}" if members[0].casts else f" {members[0].dtype} uncast"
        align = ALIGNMENT // min(flat.itemsize, flat.gradient_itemsize)
        packs = _pack(members, strategy, flat.gradient_itemsize, align, kept)
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
                        name=f"{'(kept)' if in_bucket[0] in kept else in_bucket[0]}{kind}"
                        f"{'' if trainable else ' frozen'}",
                        flat=len(flats),
                        start=start,
                        stop=offset,
                        slots=tuple(indices),
                        units=in_bucket,
                        itemsize=flat.itemsize,
                        gradient_itemsize=flat.gradient_itemsize,
                        trainable=trainable,
                        kept=in_bucket[0] in kept,
                    )
                )
        flats.append(replace(flat, numel=offset))

    # A bucket is complete when the earliest of its units has gone backward.
    buckets.sort(key=lambda bucket: (bucket.kept, -position[bucket.units[0]]))
    if not strategy.gathers:
        # There a bucket may hold several units, or a part of one.
        buckets = [replace(bucket, name=f"bucket {index}") for index, bucket in enumerate(buckets)]
    return Layout(tuple(units), tuple(slots), tuple(flats), tuple(buckets))


def _kept_units(parameters: Sequence[ParameterSpec], strategy: Strategy) -> frozenset[str]:
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


def _kinds(
    parameters: Iterable[ParameterSpec], strategy: Strategy
) -> dict[tuple[str, bool, bool], list[ParameterSpec]]:
    """The parameters of each (dtype, trainable, cast by the strategy), in order of first appearance."""
    kinds: dict[tuple[str, bool, bool], list[ParameterSpec]] = {}
    for spec in parameters:
        kinds.setdefault((spec.dtype, spec.trainable, strategy.low and spec.casts), []).append(spec)
    return kinds


def _flat(spec: ParameterSpec, strategy: Strategy) -> Flat:
    """An empty flat buffer for parameters of the same kind as `spec`."""
    if not strategy.low or not spec.casts or spec.dtype not in ("float32", "bfloat16", "float16"):
        return Flat(spec.dtype, spec.itemsize, spec.trainable, 0, spec.dtype, spec.itemsize, spec.dtype, spec.itemsize)
    low, wide = (strategy.precision, 2), ("float32", 4)
    gradient = wide if strategy.reduce_in_float32 else low
    # What is not updated needs no master.
    return Flat(*low, spec.trainable, 0, *(wide if spec.trainable else low), *gradient)


def _pack(
    members: Sequence[ParameterSpec], strategy: Strategy, itemsize: int, align: int, kept: frozenset[str]
) -> list[list[ParameterSpec]]:
    """Cuts an ordered list of parameters into those that share a bucket."""
    if strategy.packing == "flat":
        return [list(members)]
    if strategy.packing == "parameter":
        return [[spec] for spec in members]
    packs: list[list[ParameterSpec]] = []
    filled, last = 0, ""
    for together in _together(members, strategy, kept):
        size = sum(_round_up(spec.numel, align) for spec in together) * itemsize
        unit = together[0].unit
        # A unit's parameters are gathered for it alone.
        apart = strategy.gathers and not (unit in kept and last in kept)
        if not packs or apart or (not strategy.gathers and filled + size > strategy.bucket_bytes):
            packs.append([])
            filled = 0
        packs[-1] += together
        filled += size
        last = unit
    return packs


def _together(members: Sequence[ParameterSpec], strategy: Strategy, kept: frozenset[str]) -> list[list[ParameterSpec]]:
    """What must not be cut: parameters, or from stage 2 on units, whose gradients share a buffer's lifetime."""
    if strategy.stage < 2:
        return [[spec] for spec in members]
    units = dict.fromkeys(spec.unit for spec in members)
    return [[spec for spec in members if spec.unit == unit] for unit in units]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
