"""Where the shard of a parameter that a rank keeps lies in the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.layout import Bucket, ParameterSpec
from paceline.engine.engine import Engine


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


def local_shard(engine: Engine, index: int, whole: Tensor) -> Tensor:
    """What this rank keeps of a parameter between steps: its part of the shard, or the whole where nothing is sharded.

    Args:
        engine: Of this rank.
        index: Of the parameter's slot.
        whole: The parameter, or something of its shape.
    """
    bucket, shards = bucket_of(engine, index), engine.schedule.shards
    if bucket is None or shards == 1:
        return whole
    slot = engine.layout.slots[index]
    start, stop = engine.layout.shard_of(bucket, index, engine.world.rank % shards, shards)
    return in_memory_order(whole, slot.spec)[start - slot.offset : stop - slot.offset]
