"""A small model and its training loop, on a GPU as in one process and in parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy

STEPS, MICRO_BATCHES, ROWS = 6, 3, 24


class Net(nn.Module):
    """Blocks, a scalar that a container holds, and a frozen parameter."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(3)
        )
        self.head = nn.Linear(width, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.full((width,), 0.1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.scale + self.shift
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.head(x)
        return y


def make(dtype: torch.dtype, device: torch.device) -> Net:
    """The same weights wherever it is made."""
    torch.manual_seed(0)
    return Net().to(dtype).to(device)


def batches(dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Every step's rows, on the device before the first step."""
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(ROWS, size, generator=generator, dtype=torch.float64).to(dtype).to(device) for size in (4, 2))  # type: ignore[misc]
        for _ in range(STEPS)
    ]


def train(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    before_step: Callable[[int], object] = lambda step: None,
) -> dict[str, Any]:
    """Trains a plain model, or a parallel one on this rank's rows; weights, losses and norms, on the CPU."""
    engine = getattr(model, "_paceline_engine", None)
    rank, n = (engine.world.rank, engine.world.world_size) if engine else (0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step, (x, y) in enumerate(batches(dtype, device)):
        before_step(step)
        pairs = list(zip(x[rank::n].chunk(MICRO_BATCHES), y[rank::n].chunk(MICRO_BATCHES), strict=True))
        total = torch.zeros((), device=device, dtype=torch.float64)
        for xs, ys in pl.accumulate(model, pairs) if engine else pairs:
            # Torch 2.11 takes the loss of two dtypes, and fails in its backward.
            loss = F.mse_loss(model(xs).to(ys.dtype), ys) / MICRO_BATCHES
            if engine:
                engine.count(loss)
            total += loss.detach().double()
            loss.backward()
        norms.append(pl.clip_grad_norm_(model, 0.5) if engine else nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        losses.append(engine.counts()[0] / n if engine else total)
        optimizer.step()
        optimizer.zero_grad()
    before_step(STEPS)
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    return {"weights": weights, "losses": torch.stack(losses).cpu(), "norms": torch.stack(norms).cpu()}


def in_parallel(
    strategy: Strategy, dtype: torch.dtype, before_step: Callable[[int], object] = lambda step: None
) -> dict[str, Any]:
    """`train` of a parallel model on this rank's GPU."""
    device = pl.init().device
    model = pl.parallelize(make(dtype, device), strategy)
    found = train(model, dtype, device, before_step)
    pl.release(model)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], atol: float) -> None:
    """Compares weights, losses and norms."""
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name].to(value.dtype), value, atol=atol, rtol=0, msg=name)
    for name in ("losses", "norms"):
        torch.testing.assert_close(found[name].double(), expected[name].double(), atol=atol, rtol=0, msg=name)


POLICIES = {
    f"zero {stage}, {accumulation}": Strategy(zero=stage, accumulation=accumulation, bucket_mb=1e-3)
    for stage in (0, 1, 2, 3)
    for accumulation in ("auto", "each", "defer", "hold")
    if accumulation != "hold" or stage == 3
}
"""Every stage with everything that there is to happen between micro-batches."""

CASES = {
    **POLICIES,
    **{f"{name}, recomputing": replace(strategy, recompute="unit") for name, strategy in POLICIES.items()},
}
