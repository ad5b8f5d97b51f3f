"""Dynamic loss scaling for float16, decided on the device, alike on every rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIRST = 2.0**16
"""Scale of the mean loss to start from, as torch's own scaler has it."""

GROWTH_INTERVAL = 2000
"""Steps in a row with finite gradients after which the scale is doubled."""


class DynamicLossScale:
    """What the loss is multiplied by, so that small gradients do not vanish in float16 (Micikevicius et al. 2018).

    It is halved when the gradient of a step is not finite, which all ranks know alike, and doubled after many that
    were. Nothing of it waits for a GPU.

    Attributes:
        value: fp32, 0-dim, on the device.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        """Begins with a power of two, as scaling by one rounds nothing.

        Args:
            tokens: Target tokens over which the loss of a backward is summed: it is so many times the mean already.
            device: Where the loss is.
        """
        self.value = torch.tensor(FIRST / 2 ** round(math.log2(max(1, tokens))), device=device)
        self._finite_in_a_row = torch.zeros((), device=device)

    def update(self, unusable: Tensor) -> None:
        """Takes a step's outcome.

        Args:
            unusable: fp32, 0-dim: 1 where the gradient was not finite, else 0.
        """
        self._finite_in_a_row = (self._finite_in_a_row + 1) * (1 - unusable)
        grows = (self._finite_in_a_row == GROWTH_INTERVAL).float()
        self._finite_in_a_row *= 1 - grows
        self.value = self.value * (1 - 0.5 * unusable) * (1 + grows)

    def state_dict(self) -> dict[str, Tensor]:
        """What `load_state_dict` takes."""
        return {"value": self.value, "finite_in_a_row": self._finite_in_a_row}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on from there."""
        self.value = state["value"].to(self.value.device)
        self._finite_in_a_row = state["finite_in_a_row"].to(self.value.device)
