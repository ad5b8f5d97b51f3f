"""Gradients in fewer bytes between hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, Stack, data, make
from tests.quick import diagonal

STEPS = 20


def train(strategy: Strategy) -> tuple[dict[str, torch.Tensor], float, int]:
    """Weights, loss, and bytes that went over sockets for gradients."""
    world = pl.init()
    model = pl.parallelize(make(Stack, 64).float(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = (part[world.rank :: world.world_size].float() for part in data(0, 24))
    reduce = pl.engine_of(model).program.collectives.transports["reduce"]
    before = reduce.sent_bytes
    for _ in range(STEPS):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = reduce.sent_bytes - before
    with pl.full_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}, loss.item(), sent


@pytest.mark.parametrize(("wire", "stage"), diagonal(["int8", "bfloat16"], ["zero 0", "zero 1", "zero 3"]))
def test_training_goes_as_it_does_in_full_and_ranks_stay_alike(ranks, wire, stage) -> None:
    strategy = replace(STAGES[stage], bucket_mb=0.01)
    full = ranks(2, train, strategy, transport="tcp")
    wired = ranks(2, train, replace(strategy, wire=wire), transport="tcp")
    start = ranks(2, train, replace(strategy, wire=wire), transport="auto")
    for name, weight in wired[0][0].items():
        assert torch.equal(weight, wired[1][0][name]), "ranks have the same weights"
        difference = (weight - full[0][0][name]).abs().max().item()
        assert difference < {"bfloat16": 2e-3, "int8": 5e-3}[wire]
    assert any(not torch.equal(weight, full[0][0][name]) for name, weight in wired[0][0].items())
    assert wired[0][1] == pytest.approx(full[0][1], rel=0.02)
    # Headers are much of such small messages.
    assert full[0][2] / wired[0][2] > {"bfloat16": 1.6, "int8": 2.5}[wire]
    # Ranks that share memory send nothing, and lose nothing.
    for name, weight in start[0][0].items():
        torch.testing.assert_close(weight, full[0][0][name], atol=1e-6, rtol=0)


def test_wire_is_about_fp32_gradients() -> None:
    with pytest.raises(UserError, match="set reduce_in_float32, or wire to full"):
        Strategy(wire="int8", precision="bfloat16", reduce_in_float32=False)
