"""Stages are one computation: what is sharded, and when its collectives end, changes no bit of a result."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from paceline.core.collectives.rounds import Traffic
from paceline.core.ops import Op
from paceline.core.strategy import Strategy
from paceline.engine.engine import Engine
from tests.engine.models import (
    SHARDED,
    STAGES,
    Stack,
    assert_same,
    data,
    make,
    several_groups,
    shares,
    snapshot,
)
from tests.quick import diagonal, some


def delay(engine: Engine, rank: int) -> None:
    """Makes every collective come late by another time, while memory is taken and given back beside it."""
    chance = random.Random(rank)
    quick = engine.program.executor._work

    def slow(op: Op, *args: Any) -> Callable[[], Traffic]:
        work = quick(op, *args)

        def later() -> Traffic:
            time.sleep(chance.uniform(0, 0.002))
            churn = [torch.full((chance.randrange(1, 4096),), torch.nan) for _ in range(8)]
            traffic = work()
            del churn
            return traffic

        return later

    engine.program.executor._work = slow


def in_float32(strategy: Strategy, delayed: bool = False, micro_batches: int = 1) -> dict:
    model = pl.parallelize(make(Stack, 24).float(), strategy)
    if delayed:
        delay(pl.engine_of(model), pl.init().rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x, y = (shares(part).float().chunk(micro_batches) for part in data(step, 12))
        for xs, ys in pl.accumulate(model, list(zip(x, y, strict=True))):
            F.mse_loss(model(xs).float(), ys).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    pl.release(model)
    return state


@pytest.mark.parametrize(("n", "transport"), diagonal([3, 2, 4], ["tcp", "auto"], quick={("3", "tcp"), ("2", "auto")}))
def test_stages_give_the_same_bits_in_float32(ranks, n, transport) -> None:
    expected = ranks(n, in_float32, STAGES["zero 0"], transport=transport)[0]
    for strategy in SHARDED.values():
        for state in ranks(n, in_float32, strategy, transport=transport):
            assert_same(state, expected, atol=0)


@several_groups
def test_late_collectives_change_no_bit(ranks, strategy, n) -> None:
    expected = ranks(n, in_float32, strategy)[0]
    for state in ranks(n, in_float32, strategy, True):
        assert_same(state, expected, atol=0)


# A reduction of one micro-batch beside the collection of the next.
OVERTAKEN = {
    **{f"{name}, each": replace(strategy, accumulation="each") for name, strategy in STAGES.items()},
    "zero 3, held": replace(STAGES["zero 3"], accumulation="hold"),
    "zero 2, bfloat16": replace(STAGES["zero 2"], precision="bfloat16"),
    "zero 3, bfloat16": replace(STAGES["zero 3"], precision="bfloat16"),
}


# In float64 tests/engine/test_late_streams.py has all of them.
@pytest.mark.full
@pytest.mark.parametrize("name", some(OVERTAKEN, {"zero 0, each", "zero 2, bfloat16", "zero 3, bfloat16"}))
def test_late_collectives_of_micro_batches_change_no_bit(ranks, name) -> None:
    strategy = OVERTAKEN[name]
    expected = ranks(2, in_float32, strategy, False, 3)[0]
    for state in ranks(2, in_float32, strategy, True, 3):
        assert_same(state, expected, atol=0)
