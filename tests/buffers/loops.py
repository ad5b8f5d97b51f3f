"""A small model, its loss, the strategies that it is trained by, and memory that does not move, as on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.as_on_gpus import as_on_gpus

STRATEGIES = {
    "zero 0": Strategy(bucket_mb=1e-4),
    "zero 0, each": Strategy(bucket_mb=1e-4, accumulation="each"),
    "zero 1": Strategy(zero=1, bucket_mb=1e-4),
    "zero 1, each": Strategy(zero=1, accumulation="each"),
    "zero 2": Strategy(zero=2),
    "zero 3": Strategy(zero=3),
    "shared parameters": Strategy(zero=2, share_parameters=True),
}
QUICK = ("zero 0", "zero 2", "zero 3")
every_strategy = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in STRATEGIES]
)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss_of(model: nn.Module, seed: int, rank: int = 0, ranks: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, width, dtype=torch.float64, generator=generator) for width in (6, 3))
    return (model(x.chunk(ranks)[rank]) - y.chunk(ranks)[rank]).square().mean()


def refused_in(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_in: Callable[[int], Tensor], edit: Callable[[], object]
) -> tuple[int, str]:
    """In which step an edit between backward and update of the second one is refused, and what is said then.

    Releases the model.
    """
    try:
        for step in range(5):
            loss_in(step).backward()
            if step == 1:
                edit()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    except EngineError as error:
        return step, str(error)
    finally:
        pl.reset(model)
        pl.release(model)
    return -1, ""


@contextmanager
def gpu_memory() -> Iterator[None]:
    """Inside, models that are made parallel take their buffers for a GPU's."""
    with as_on_gpus(), patch("paceline.buffers.handed_out._can_move", lambda tensor: False):
        yield


ON_GPUS = {name: strategy for name, strategy in STRATEGIES.items() if not strategy.share_parameters}
