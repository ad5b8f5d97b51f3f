"""A parallel model that nobody holds any more, as one that was not released, does not disturb the next."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim import optimizer as hooks

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, data, make, shares, snapshot
from tests.quick import diagonal


def collect(*rest: Any) -> None:
    gc.collect()


def after_another(strategy: Strategy, register: Callable[..., Any]) -> dict:
    """Trains while the garbage collector runs in the middle of an optimizer's hooks, where it may at any time."""
    # The first model is collected in the hook, and no earlier.
    gc.disable()
    try:
        pl.parallelize(make(), strategy)
        handle = register(collect)
        model = pl.parallelize(make(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = (shares(part) for part in data(0, 12))
        F.mse_loss(model(x), y).backward()
        try:
            optimizer.step()
        finally:
            handle.remove()
    finally:
        gc.enable()
    state = snapshot(model)
    pl.release(model)
    return state


@pytest.mark.parametrize(("strategy", "when"), diagonal(STAGES, ["pre", "post"]))
def test_it_is_collected_without_harm(ranks, strategy, when) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data(0, 12)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    register = getattr(hooks, f"register_optimizer_step_{when}_hook")
    for state in ranks(2, after_another, strategy, register):
        assert_same(state, snapshot(model))
