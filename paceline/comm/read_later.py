"""Values that a GPU has computed, read by the host when it hardly waits for them any more."""

from __future__ import annotations

import torch
from torch import Tensor


class ReadLater:
    """Hands out what was handed in one call before: a GPU has it by then, as its host is but a step ahead."""

    def __init__(self) -> None:
        """Nothing was handed in."""
        self._asked: tuple[Tensor, torch.cuda.Event | None] | None = None

    def exchange(self, values: Tensor) -> Tensor | None:
        """Takes values, and returns those of the call before, on the host; None in the first.

        Args:
            values: Of any shape and dtype, on any device; they may change as soon as this returns.
        """
        asked = self._asked
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event() if values.is_cuda else None
        if copied is not None:
            copied.record(torch.cuda.current_stream(values.device))
        self._asked = host, copied
        if asked is None:
            return None
        earlier, arrived = asked
        if arrived is not None:
            arrived.synchronize()
        return earlier
