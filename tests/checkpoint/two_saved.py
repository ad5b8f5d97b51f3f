"""A small training of which two checkpoints are saved, and what comes of loading them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import snapshot


def parallel(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = pl.parallelize(nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 3)), Strategy(zero=1))
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def two_saved(folder: Path) -> dict[str, Any]:
    """Checkpoints of steps 1 and 2; returns the weights of step 1."""
    model, optimizer = parallel()
    step(model, optimizer)
    first = snapshot(model)
    pl.save(folder / "step-00000001", model, optimizer, step=1)
    step(model, optimizer)
    pl.save(folder / "step-00000002", model, optimizer, step=2)
    return first


def loaded(folder: Path) -> tuple[int, dict[str, Any], list[str]]:
    model, optimizer = parallel(seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = pl.load(folder, model, optimizer)
    # What came of it can be trained.
    step(model, optimizer)
    pl.load(found.path, model, optimizer)
    return found.step, snapshot(model), [str(warning.message) for warning in caught]


def refused(folder: Path) -> str:
    model, optimizer = parallel(seed=1)
    with pytest.raises(pl.UserError) as caught:
        pl.load(folder, model, optimizer)
    return str(caught.value)
