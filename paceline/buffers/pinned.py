"""Sharded parameters that were used outside their unit: whole in memory of their own for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.buffers.flat_parameters import FlatParameters
from paceline.buffers.memory import parameter_in
from paceline.core.layout import Bucket


class Pinned:
    """Whole copies of the buckets that such parameters are in.

    Attributes:
        views: Each parameter of these buckets whole, by index.
        copies: The buckets, by name: flat, in the dtype that is computed with.
    """

    def __init__(self, flat: FlatParameters) -> None:
        """Pins no bucket yet."""
        self._flat = flat
        self.views: dict[int, Tensor] = {}
        self.copies: dict[str, Tensor] = {}

    def gather(self, index: int, gather: Callable[[Bucket, Tensor], None]) -> Sequence[int]:
        """Copies the bucket of a parameter, whole; returns the indices of all parameters in it.

        Args:
            index: Which parameter.
            gather: (bucket, memory): gathers a bucket there. A collective call.
        """
        bucket = self._flat.bucket_of[index]
        memory = self.copies.get(bucket.name)
        if memory is None:
            memory = torch.empty(bucket.numel, dtype=self._flat.dtype(bucket), device=self._flat.device)
            self.copies[bucket.name] = memory
        gather(bucket, memory)
        for slot in bucket.slots:
            self.views[slot] = parameter_in(memory, self._flat.layout.slots[slot], bucket.start)
        return bucket.slots

    def clear(self) -> None:
        """Forgets all copies."""
        self.views, self.copies = {}, {}
