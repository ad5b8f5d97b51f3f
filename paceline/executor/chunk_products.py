"""Inner products between ranks' gradients, chunk by chunk: the norm of every partial sum of a reduction follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.buffers.memory import parameter_in
from paceline.comm.control import all_gather_json
from paceline.comm.to_rank_0 import gather_to_rank_0
from paceline.core.collectives.rounds import chunk
from paceline.core.layout import Bucket
from paceline.core.schedule import Schedule

MOST_RANKS = 16
MOST_ELEMENTS = 1 << 26
"""Of the gradients of all ranks together: rank 0 has the largest bucket's of all ranks at once."""


@dataclass(frozen=True)
class ChunkProducts:
    """Products of ranks' own gradients of one bucket, as the last reduction of a step was given them.

    The squared norm of what some ranks' gradients add up to is the sum of the products of each two of these ranks, in
    whatever order an algorithm adds them up.

    Attributes:
        bucket: Its name.
        products: By chunk, fp64: of rank 0 with each rank, of rank 1 with each from 1 on, and so forth.
    """

    bucket: str
    products: list[list[float]]


def is_small_enough(schedule: Schedule) -> bool:
    """Whether products are taken of gradients like these."""
    numel = sum(bucket.numel for bucket in schedule.reduced_buckets)
    return 1 < schedule.world_size <= MOST_RANKS and numel * schedule.world_size <= MOST_ELEMENTS


def chunk_products(schedule: Schedule, local: Mapping[int, Tensor] | None) -> list[ChunkProducts]:
    """The products of all buckets, on rank 0; none on the others. A collective call.

    Args:
        schedule: Of this rank.
        local: By slot of the layout, this rank's own gradients before they were reduced; zero where there is nothing.
            None if they are not known, and then there are no products.
    """
    if not all(all_gather_json(local is not None, "whether products of gradients can be taken")) or local is None:
        return []
    chunks = schedule.shards if schedule.shards > 1 else schedule.world_size
    found = []
    for bucket in schedule.reduced_buckets:
        rows = gather_to_rank_0(_flat(schedule, bucket, local), f"gradients of {bucket.name}")
        if rows:
            parts = [chunk(index, chunks, bucket.numel) for index in range(chunks)]
            products = [_products(torch.stack([row[start:stop] for row in rows])) for start, stop in parts]
            found.append(ChunkProducts(bucket.name, products))
    return found


def _flat(schedule: Schedule, bucket: Bucket, local: Mapping[int, Tensor]) -> Tensor:
    """A bucket's gradients, (numel,), at least fp32, zero where there are none."""
    flat = torch.zeros(bucket.numel, dtype=torch.float64 if bucket.gradient_itemsize > 4 else torch.float32)
    for index in bucket.slots:
        if index in local:
            parameter_in(flat, schedule.layout.slots[index], bucket.start).copy_(local[index])
    return flat


def _products(rows: Tensor) -> list[float]:
    """Products of each two of some rows: of the first with all, of the second from itself on, and so forth."""
    wide = rows.double()
    of_all = wide @ wide.T
    first, second = torch.triu_indices(len(rows), len(rows)).unbind()
    return [float(value) for value in of_all[first, second].tolist()]
