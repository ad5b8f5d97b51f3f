"""Scratch memory of a transport."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Memory that the collectives of one transport share, as they run one after another."""

    def __init__(self) -> None:
        """Allocates nothing yet."""
        self._tensors: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, what: str, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements, the same memory for every collective that asks for the same `what`."""
        tensor = self._tensors.get((what, dtype))
        if tensor is None or tensor.numel() < numel:
            tensor = torch.empty(1 << max(10, (numel - 1).bit_length()), dtype=dtype)
            self._tensors[what, dtype] = tensor
        return tensor[:numel]
