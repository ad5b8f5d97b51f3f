"""Threads beside the one that trains: a logger that reads weights has no part in what is computed."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, data, shares, snapshot
from tests.quick import some


def trained(strategy: Strategy, is_read: bool) -> tuple[dict[str, Tensor], int]:
    """Weights after steps, and how often a thread has read one of them meanwhile."""
    torch.manual_seed(0)
    model = pl.parallelize(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 2)), strategy)
    optimizer, over, sums = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), threading.Event(), list[float]()

    def read() -> None:
        while not over.is_set():
            sums.append(model[2].weight.detach().sum().item())

    thread = threading.Thread(target=read, daemon=True)
    if is_read:
        thread.start()
    for step in range(60):
        x, y = (shares(part).float() for part in data(step, 12))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    over.set()
    if is_read:
        thread.join()
    state = snapshot(model)
    pl.release(model)
    return state, len(sums)


CASES = {
    **{name: STAGES[name] for name in ("zero 0", "zero 1", "zero 2")},
    "zero 2, low": replace(STAGES["zero 2"], precision="bfloat16"),
    "zero 2, shared parameters": replace(STAGES["zero 2"], share_parameters=True),
}


@pytest.mark.parametrize("name", some(CASES, {"zero 2"}))
def test_one_that_reads_weights_changes_nothing(ranks, name: str) -> None:
    for (state, reads), (alone, _) in zip(
        ranks(2, trained, CASES[name], True), ranks(2, trained, CASES[name], False), strict=True
    ):
        assert reads > 20
        assert_same(state, alone, atol=0)
