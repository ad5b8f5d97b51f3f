"""Scratch memory of a transport."""

from __future__ import annotations

import torch
from torch import Tensor


class Room:
    """Scratch memory that calls of one transport share, as they run one after another."""

    def __init__(self) -> None:
        """Takes nothing yet."""
        self._rooms: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, what: str, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements, the same memory for every call that asks for the same `what`."""
        room = self._rooms.get((what, dtype))
        if room is None or room.numel() < numel:
            room = torch.empty(1 << max(10, (numel - 1).bit_length()), dtype=dtype)
            self._rooms[what, dtype] = room
        return room[:numel]
