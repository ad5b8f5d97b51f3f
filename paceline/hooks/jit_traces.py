"""A forward that torch.jit.trace records: it trains nothing, whatever gradients are switched to."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn


class WithoutGradients:
    """Hooks of a model by which forwards that are traced run without gradients.

    A trace is of what the model computes, such as for a logger's picture of its graph, and torch compares it with a
    second one. Hooks around a forward with gradients would be in both, and not alike: they do more in the first.
    """

    def __init__(self) -> None:
        """No traced forward is under way."""
        self._switched: list[tuple[int, bool]] = []
        """In which thread gradients were switched off, and what they were before."""

    def begin(self, module: nn.Module, args: Any) -> None:
        """A forward begins."""
        # Traces are of a thread: forwards of others have no part in this.
        if torch._C._get_tracing_state() is not None:
            self._switched.append((threading.get_ident(), torch.is_grad_enabled()))
            torch._C._set_grad_enabled(False)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """It is over, or has raised, which ends the trace before."""
        if self._switched and self._switched[-1][0] == threading.get_ident():
            torch._C._set_grad_enabled(self._switched.pop()[1])
