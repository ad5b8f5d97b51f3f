"""A parallel model that nobody holds any more, as one that was not released, does not disturb the next."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import paceline as pl
from paceline.strategy import Strategy
from tests.engine.models import assert_same, data, every_world, make, shares, snapshot


def after_another(strategy: Strategy) -> dict:
    """Trains while the garbage collector runs in the middle of an optimizer's hooks, where it may at any time."""

    def collect(*rest: Any) -> None:
        gc.collect()

    handles = [register_optimizer_step_pre_hook(collect), register_optimizer_step_post_hook(collect)]
    gc.disable()
    try:
        dropped = pl.parallelize(make(), strategy)
        model = pl.parallelize(make(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        del dropped
        for step in range(2):
            x, y = (shares(part) for part in data(step, 12))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = snapshot(model)
        pl.release(model)
    finally:
        gc.enable()
        for handle in handles:
            handle.remove()
    return state


@every_world
def test_it_is_collected_without_harm(ranks, strategy, n) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = data(step, 12)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in ranks(n, after_another, strategy):
        assert_same(state, snapshot(model))
