"""Frozen weights in integers, as quantised models have them, beside adapters that are trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, data, in_parallel, make, rows_of, snapshot


class Quantised(nn.Module):
    """A layer of int8 weights with a bias of packed bytes, and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-9, 9, (6, 6), dtype=torch.int8), requires_grad=False)
        self.packed = nn.Parameter(torch.randint(0, 9, (6,), dtype=torch.uint8), requires_grad=False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        frozen = F.linear(x, 0.1 * self.weight.to(x.dtype), 0.1 * self.packed.to(x.dtype))
        return x + torch.tanh(frozen) + self.up(self.down(x))


class Adapted(nn.Module):
    """Made in float64 but for what is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Quantised() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    for step in range(3):
        x, y = (rows_of(model, part).to(dtype) for part in data(step, 8))
        F.mse_loss(model(x).to(dtype), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@pytest.mark.parametrize("strategy", STAGES.values(), ids=STAGES)
def test_adapters_of_integers_train_as_in_one_process(ranks, strategy: Strategy) -> None:
    for found in ranks(2, in_parallel, strategy, Adapted, train):
        assert_same(found, train(make(Adapted)))


def in_low_precision(strategy: Strategy) -> dict[str, Tensor]:
    model = pl.parallelize(make(Adapted).float(), replace(strategy, precision="bfloat16"))
    found = train(model)
    pl.release(model)
    return found


def test_integers_stay_integers_in_low_precision(ranks) -> None:
    expected = train(make(Adapted).float())
    for found in ranks(2, in_low_precision, STAGES["zero 3"]):
        assert_same(found, expected, atol=0.03)
