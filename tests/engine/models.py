"""Small models and helpers that several engine tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import paceline as pl
from paceline.strategy import SYSTEMS, Strategy


class Stack(nn.Module):
    """An embedding-like input layer, repeated blocks and a head."""

    def __init__(self, width: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def data(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """fp64 inputs (count, 4) and targets (count, 2)."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 4, generator=generator, dtype=torch.float64),
        torch.randn(count, 2, generator=generator, dtype=torch.float64),
    )


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's weights and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of a model's gradients."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def assert_same(results: dict[str, Any], expected: dict[str, Any], atol: float = 1e-12) -> None:
    """Compares two dictionaries of tensors or None."""
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert results[name] is None, name
        else:
            torch.testing.assert_close(results[name], value, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


PARALLEL = [Strategy(bucket_mb=1e-4), SYSTEMS["parameter server"]]
"""The two ways in which gradients come to parameters: on every rank, or on rank 0."""


def make(cls: type[nn.Module] = Stack, *args: Any) -> nn.Module:
    """A model in fp64 with the same weights wherever it is made."""
    torch.manual_seed(0)
    return cls(*args).double()


def shares(x: Tensor) -> Tensor:
    """This rank's rows of a batch."""
    world = pl.init()
    return x[world.rank :: world.world_size]


def fail_in_backward(gradient: Tensor) -> None:
    """A tensor hook that raises."""
    raise ValueError("in the middle of backward")
