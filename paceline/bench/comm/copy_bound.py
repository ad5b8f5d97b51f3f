"""The bound that memory sets for collectives on one host: every rank copying at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paceline.bench.comm.calls import Call


class CopyLibrary:
    """`tensor.copy_` between two private buffers, as if it were a collective."""

    def __init__(self, most: int, dtype: torch.dtype, barrier: Callable[[], object]) -> None:
        """Copies up to `most` elements; `barrier` is the group's."""
        self.name = "memory"
        self.algorithms = {"copy": ("copy",)}
        self._most = most
        self._dtype = dtype
        self._barrier = barrier
        self._buffers: tuple[Tensor, Tensor] | None = None

    def call(self, op: str, algorithm: str, numel: int) -> Call:
        """See `Library.call`."""
        if self._buffers is None:
            self._buffers = torch.zeros(self._most, dtype=self._dtype), torch.zeros(self._most, dtype=self._dtype)
        source, target = (buffer[:numel] for buffer in self._buffers)
        return Call(source, target, partial(target.copy_, source), self._barrier)
