"""How far one tensor is from another, and where a rank's piece of a parameter lies in the whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.engine.engine import Engine
from paceline.layout import Bucket, ParameterSpec


def deviation(actual: Tensor, expected: Tensor, scale: float) -> float:
    """Largest difference of two tensors' elements, divided by `scale`.

    Returns:
        Infinite where shapes differ or an element is not a number in one of them.
    """
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    difference = (actual.detach().double() - expected.detach().double()).abs().max().item()
    return math.inf if math.isnan(difference) else difference / scale


def largest(tensor: Tensor) -> float:
    """Largest magnitude of a tensor's elements; 0 for an empty one."""
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def in_memory_order(tensor: Tensor, spec: ParameterSpec) -> Tensor:
    """The elements of a parameter-shaped tensor in the order in which the flat buffer holds them.

    Returns:
        Shape (numel,).
    """
    flat = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype).copy_(tensor)
    return flat.as_strided((spec.numel,), (1,))


def bucket_of(engine: Engine, index: int) -> Bucket | None:
    """The bucket that holds a slot; None for a frozen parameter that no collective moves, or an empty one."""
    return next((bucket for bucket in engine.layout.buckets if index in bucket.slots), None)


def piece(engine: Engine, index: int, whole: Tensor) -> Tensor:
    """What this rank keeps of a parameter between steps: its piece of the shard, or the whole where nothing is sharded.

    Args:
        engine: Of this rank.
        index: Of the parameter's slot.
        whole: The parameter, or something of its shape.
    """
    bucket, shards = bucket_of(engine, index), engine.schedule.shards
    if bucket is None or shards == 1:
        return whole
    slot = engine.layout.slots[index]
    start, stop = engine.layout.piece(bucket, index, engine.world.rank % shards, shards)
    return in_memory_order(whole, slot.spec)[start - slot.offset : stop - slot.offset]
