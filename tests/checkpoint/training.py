"""A training with everything that a checkpoint must keep, as one rank of any job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import snapshot

BATCH = 12


class Model(nn.Module):
    """Strided, tied, frozen, scalar and unused parameters, and buffers of both kinds."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.blocks[2][0].bias = self.blocks[0][0].bias
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(7))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("noise", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.conv(x).mean((2, 3)) + self.frozen
        for block in self.blocks:
            x = x + self.drop(block(x))
        return self.head(x) * self.scale


def built(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(3)
    return Model(dropout).to(dtype)


def optimizer_of(model: nn.Module, name: str = "AdamW") -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    if name == "SGD":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return getattr(torch.optim, name)(groups, lr=0.01, **({"amsgrad": True} if name == "AdamW" else {}))


def steps(model: nn.Module, optimizer: Any, scheduler: Any, first: int, last: int) -> list[float]:
    """Takes steps; returns each one's mean loss over all ranks."""
    world, losses = pl.init(), []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        dtype = next(model.parameters()).dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        x = torch.randn(BATCH, 3, 4, 4, generator=generator, dtype=torch.float64).to(wide)
        y = torch.randn(BATCH, 2, generator=generator, dtype=torch.float64).to(wide)
        own = slice(BATCH * world.rank // world.world_size, BATCH * (world.rank + 1) // world.world_size)
        loss = F.mse_loss(model(x[own]).to(wide), y[own])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(sum(pl.all_gather_json(loss.item())) / world.world_size)
    return losses


def everything(model: nn.Module, losses: list[float]) -> dict[str, Tensor]:
    return {**snapshot(model), "losses": torch.tensor(losses, dtype=torch.float64)}


def start(strategy: Strategy, optimizer: str, dropout: float, dtype: torch.dtype) -> tuple[nn.Module, Any, Any]:
    model = pl.parallelize(built(dropout, dtype), strategy)
    made = optimizer_of(model, optimizer)
    return model, made, torch.optim.lr_scheduler.MultiStepLR(made, [2, 4], gamma=0.5)


def saved(
    folder: Path,
    strategy: Strategy,
    optimizer: str = "AdamW",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    background: bool = False,
) -> dict[str, Tensor]:
    """Three steps, a checkpoint, three more; returns what these gave."""
    model, made, scheduler = start(strategy, optimizer, dropout, dtype)
    torch.manual_seed(pl.init().rank)
    steps(model, made, scheduler, 0, 3)
    extra = {"best": float("inf"), "moments": (1, torch.arange(3))}
    done = pl.save(folder, model, made, step=3, scheduler=scheduler, extra=extra, background=background)
    losses = steps(model, made, scheduler, 3, 6)
    done.wait()
    return everything(model, losses)


def resumed(
    folder: Path,
    strategy: Strategy,
    optimizer: str = "AdamW",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    has_stepped: bool = True,
) -> dict[str, Tensor]:
    """Three steps from a checkpoint, with a model of other weights and, as a rule, an optimizer that has stepped."""
    model, made, scheduler = start(strategy, optimizer, dropout, dtype)
    if has_stepped:
        steps(model, made, scheduler, 7, 8)
    loaded = pl.load(folder, model, made, scheduler=scheduler)
    assert loaded.step == 3 and loaded.extra["best"] == float("inf")
    assert loaded.extra["moments"][0] == 1 and loaded.extra["moments"][1].tolist() == [0, 1, 2]
    return everything(model, steps(model, made, scheduler, 3, 6))
