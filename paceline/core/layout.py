"""Where each parameter sits: parameters -> units -> flat buffers -> buckets.

Pure: a function of names, shapes, dtypes and the world size. Nothing here holds a tensor, so the layout
of a 70B model on the meta device costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import EngineError

ROOT = "(root)"
"""Name of the unit of parameters that no single unit holds: of the model itself, or shared by several units."""

ALIGNMENT = 64
"""Bytes to which every parameter's place is aligned, so that vector loads never straddle a cache line."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter, as far as the layout needs to know it.

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

    def require_shape(self, shape: Sequence[int]) -> None:
        """Refuses another shape than the parameter was laid out with.

        Raises:
            EngineError: It is another one.
        """
        if tuple(shape) != self.shape:
            raise EngineError(
                f"{self.name} changed its shape from {self.shape} to {tuple(shape)} after pl.parallelize: call "
                "pl.release(model), change it, pl.parallelize(model) again, and make a new optimizer"
            )


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

    def slot_at(self, bucket: Bucket, element: int) -> int:
        """The index of the parameter that an element of a bucket, counted from the bucket's start, belongs to."""
        return max(
            (index for index in bucket.slots if self.slots[index].offset - bucket.start <= element),
            key=lambda index: self.slots[index].offset,
        )

    @property
    def padding_bytes(self) -> int:
        """Bytes of the trainable flat buffers that hold no parameter."""
        total = sum(flat.numel * flat.itemsize for flat in self.flats if flat.trainable)
        held = (s.spec.numel * self.flats[s.flat].itemsize for s in self.slots if s.spec.trainable)
        return total - sum(held)
