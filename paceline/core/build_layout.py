"""Lays parameters out: which share a flat buffer, in which order, and which a bucket.

Pure: a function of names, shapes, dtypes and the world size. Nothing here holds a tensor, so the layout of a 70B model
on the meta device costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.core.layout import ALIGNMENT, ROOT, Bucket, Flat, Layout, ParameterSpec, Slot
from paceline.core.strategy import Strategy


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
    """Returns the parameters in groups that are not cut: each alone, or from stage 2 on a unit's, which live as one."""
    if strategy.stage < 2:
        return [[spec] for spec in members]
    units = dict.fromkeys(spec.unit for spec in members)
    return [[spec for spec in members if spec.unit == unit] for unit in units]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
