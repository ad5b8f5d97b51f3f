"""What `paceline bench strategies` trains, and what a way of training it looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import paceline as pl
from paceline.models.config import ModelConfig
from paceline.models.transformer import Transformer

Precision = Literal["float32", "bfloat16"]
"""What is computed in; weights that the optimizer updates are float32 in both."""

ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}
"""The optimizer of every system."""

GROUPS = ("stage 0", "stages 1 and 2", "stage 3")
"""What is compared with each other: systems that share the same things between the ranks."""


@dataclass(frozen=True)
class Case:
    """A model and what one rank gives it in a step."""

    name: str
    model: ModelConfig
    batch: int
    """Sequences a rank."""

    def build(self) -> Transformer:
        """The model, on the CPU, with the same weights on every rank and in every system."""
        torch.manual_seed(0)
        return Transformer(self.model)

    def data(self, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a rank, each int64 (batch, context): the same in every step."""
        generator = torch.Generator().manual_seed(rank)
        shape = (self.batch, self.model.context)
        inputs, targets = (torch.randint(0, self.model.vocabulary, shape, generator=generator) for _ in range(2))
        return inputs.to(device), targets.to(device)


CASES = (
    Case("communication-heavy", ModelConfig(layers=6, width=512, heads=8, context=64, vocabulary=2048), 1),
    Case("compute-heavy", ModelConfig(layers=6, width=384, heads=6, context=256, vocabulary=2048), 4),
    Case("tiny", ModelConfig(layers=3, width=128, heads=4, context=128, vocabulary=2048), 4),
)


@dataclass(frozen=True)
class Training:
    """A case made ready on one rank."""

    model: nn.Module
    step: Callable[[], Tensor]
    """Trains one step; returns this rank's loss before it, the mean over its tokens."""
    settle: Callable[[], None] = lambda: None
    """Waits for what a step left running, which the next step would overlap."""


Build = Callable[[Case, pl.World, Precision], Training]
"""Makes model, optimizer and step. Every rank calls it; what it needs beyond torch is imported in it."""


@dataclass(frozen=True)
class System:
    """One way to train a case on several ranks; can be pickled."""

    name: str
    """The library that it belongs to, such as "torch DDP"."""
    setting: str
    build: Build
    groups: tuple[str, ...]
    """Which of GROUPS it belongs to."""
    libraries: tuple[str, ...] = ()
    """Modules that it needs; imported before memory is first read, so that their code is not counted as the model's."""

    @property
    def label(self) -> str:
        """Name and setting."""
        return f"{self.name}: {self.setting}"
