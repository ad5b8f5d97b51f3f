"""A forward that torch.jit.trace records: it trains nothing, whatever gradients are switched to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class WithoutGradients:
    """Hooks of a model by which forwards that are traced run without gradients.

    A trace is of what the model computes, such as for a logger's picture of its graph, and torch compares it with a
    second one. Hooks around a forward with gradients would be in both, and not alike: they do more in the first.
    """

    def __init__(self) -> None:
        """No forward is under way."""
        self._switched: list[bool] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        """A forward begins."""
        switches = torch._C._get_tracing_state() is not None and torch.is_grad_enabled()
        self._switched.append(switches)
        if switches:
            torch._C._set_grad_enabled(False)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """It is over, or has raised."""
        if self._switched and self._switched.pop():
            torch._C._set_grad_enabled(True)
