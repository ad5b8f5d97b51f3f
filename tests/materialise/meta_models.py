"""Models that are made on the meta device, and what they are elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import snapshot


class Turned(nn.Module):
    """Multiplies by what a buffer that is not saved says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("angle", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.angle.copy_(torch.linspace(0.1, 1, len(self.angle), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angle.cos()


class Block(nn.Module):
    """Initialises a part of itself anew, when its parts are made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.turned = Turned(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.out.bias)
        nn.init.uniform_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) * self.scale
        y, _ = self.attention(*(self.turned(x).unsqueeze(0),) * 3, need_weights=False)
        return self.out(y.squeeze(0))


class Varied(nn.Module):
    """A tied parameter, a frozen one, a scalar of the model itself, buffers that are saved and that are not."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.before, self.head = nn.Linear(2, width, bias=False), nn.Linear(2, width, bias=False)
        self.before.weight = self.head.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.empty(()))
        self.steps: Tensor
        self.register_buffer("steps", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.steps.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.inner(x))
        for block in self.blocks:
            x = x + block(x)
        return self.scale * torch.nn.functional.linear(x, self.head.weight.t())


class Plain(Varied):
    """Without statistics of a batch, which ranks' parts of it do not have in common."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        for block in self.blocks:
            block.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.inner(x))
        for block in self.blocks:
            x = x + block.out(block.turned(block.norm(x) * block.scale))
        return self.scale * torch.nn.functional.linear(x, self.head.weight.t())


def built(cls: Callable[[], nn.Module], device: str = "cpu", seed: int = 0) -> nn.Module:
    """A model in fp64."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(seed)
        with torch.device(device):
            return cls()
    finally:
        torch.set_default_dtype(torch.float32)


def on_meta(cls: Callable[[], nn.Module]) -> nn.Module:
    """A model on the meta device, and random numbers that only rank 0 has in common with `built`."""
    model = built(cls, "meta")
    torch.manual_seed(pl.init().rank)
    return model


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {**snapshot(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def refused(cls: Callable[[], nn.Module], given: dict[str, Any]) -> str:
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(on_meta(cls), Strategy(zero=3), **given)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
