"""Which steps stand out: whose loss or gradient is far longer than those of the steps before. Decided on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STEPS = 128
"""Steps that a new one is compared with, at most."""
LEAST = STEPS // 2
"""With fewer nothing stands out."""


class Spikes:
    """The latest losses and norms of gradients.

    Means and standard deviations over a window of steps, as OLMo 2 is trained with (Walsh et al. 2025). What stood out
    is in the window too: if losses stay where they jumped to, that is soon what is usual.
    """

    def __init__(self, deviations: float, device: torch.device) -> None:
        """Knows no step.

        Args:
            deviations: By how many standard deviations what stands out is above the mean.
            device: Where losses are.
        """
        self._deviations = deviations
        # NaN where there is none.
        self._window = torch.full((2, STEPS), torch.nan, device=device)
        self._latest = self._window[:, 0].clone()
        self._count = 0

    def found(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether a step stands out: fp32, 0-dim, 1 or 0. Waits for no GPU.

        Args:
            loss: Its mean over tokens, 0-dim.
            norm: Of its gradient, 0-dim.
        """
        self._latest = torch.stack([loss.float(), norm.float()])
        known = torch.isfinite(self._window)
        count = known.sum(1)
        mean = torch.where(known, self._window, 0.0).sum(1) / count
        squares = torch.where(known, (self._window - mean[:, None]).square(), 0.0).sum(1)
        limit = mean + self._deviations * (squares / (count - 1)).sqrt()
        return ((self._latest > limit) & (count >= LEAST)).any().float()

    def stepped(self) -> None:
        """The step that was asked for last is done."""
        finite = torch.isfinite(self._latest)
        self._window[:, self._count % STEPS] = torch.where(finite, self._latest, torch.nan)
        self._count += 1

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""
        return {"window": self._window, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self._window.copy_(state["window"])
        self._count = state["count"]
