"""A parallel model that nobody holds any more, as one that was not released, does not disturb the next."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim import optimizer as hooks

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, data, make, shares, snapshot
from tests.quick import diagonal, in_turn


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


def drop(models: int, strategy: Strategy) -> None:
    """Lets so many models train a step each."""
    for step in range(models):
        model = pl.parallelize(make(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = (shares(part) for part in data(step, 12))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        del model, optimizer
        gc.collect()


def held() -> tuple[int, int, int]:
    """This process's threads, descriptors and pieces of shared memory."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    return threading.active_count(), len(os.listdir("/proc/self/fd")), len(mapped)


def left(strategy: Strategy) -> tuple[int, ...]:
    """What is there after many more than after one of them."""
    drop(2, strategy)
    few = held()
    drop(5, strategy)
    # A thread ends when the collective that it is in does.
    until = time.monotonic() + 10
    while any(now > then for now, then in zip(held(), few, strict=True)) and time.monotonic() < until:
        time.sleep(0.02)
    return tuple(max(0, now - then) for now, then in zip(held(), few, strict=True))


@pytest.mark.parametrize(
    ("strategy", "transport"),
    in_turn(STAGES, ["tcp", "auto"], times=1, quick={("zero 3", "auto"), ("zero 0", "tcp")}),
)
def test_it_leaves_neither_threads_nor_descriptors_nor_memory(ranks, strategy, transport) -> None:
    assert ranks(2, left, strategy, transport=transport) == [(0, 0, 0)] * 2
