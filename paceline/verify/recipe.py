"""How both sides of a comparison train: the constants, the optimizer, and in which order gradients are summed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from paceline.core.strategy import Strategy

LEARNING_RATE = 1e-2
EPS = 1e-3
"""Of AdamW. Large, because it divides by the size of each gradient: with a small one, gradients that are zero but for
rounding would become updates as large as all others."""


@dataclass(frozen=True)
class Recipe:
    """What a reference depends on, besides the model."""

    ranks: int
    micro_batches: int
    steps: int
    precision: str = "float32"
    """float32 leaves the model in its own dtype. With another, inputs must be whole numbers."""
    each: bool = False
    """Whether gradients are summed over ranks in every micro-batch, or over micro-batches first."""
    group: int = 0
    """Ranks that are summed first, their sums then with each other; 0: all at once."""

    @property
    def max_norm(self) -> float:
        """What gradients are clipped to: nothing in low precision, where the norm's last bit would decide roundings."""
        return 1.0 if self.precision == "float32" else math.inf

    @property
    def name(self) -> str:
        """Names the folder of the reference."""
        return f"{self.ranks}x{self.micro_batches}-{self.precision}-{'each' if self.each else 'defer'}-{self.group}"


def recipe_for(strategy: Strategy, ranks: int, micro_batches: int, steps: int) -> Recipe:
    """What a strategy is compared with.

    In low precision a last bit decides how a weight is rounded, so there sums are made in the engine's own order.
    """
    if not strategy.low:
        return Recipe(ranks, micro_batches, steps)
    shards = strategy.shards(ranks)
    group = shards if 1 < shards < ranks else 0
    return Recipe(ranks, micro_batches, steps, strategy.precision, strategy.reduces_every_micro_batch, group)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPS)
