"""Weights taken at one stage and number of ranks go on at another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import paceline as pl
from paceline.strategy import Strategy
from tests.engine.models import STAGES, data, make, shares, snapshot


def steps(
    strategy: Strategy | None, start: dict[str, Tensor] | None, first: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Three steps of plain SGD from `start`: the whole state after them, and the losses of the global batches."""
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    if start is not None:
        model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(first, first + 3):
        x, y = data(number, 12)
        if strategy is not None:
            x, y = shares(x), shares(y)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        every = pl.all_gather_json(loss.item()) if strategy is not None else [loss.item()]
        losses.append(sum(every) / len(every))
    return snapshot(model), losses


@pytest.mark.parametrize(
    ("before", "after"),
    [((4, "zero 3"), (3, "zero 1")), ((2, "zero 2"), (4, "zero 3")), ((3, "zero 3"), (1, "zero 0"))],
)
def test_the_next_losses_match(ranks, before, after) -> None:
    (n, stage), (m, other) = before, after
    state, _ = ranks(n, steps, STAGES[stage], None, 0)[0]
    expected, _ = steps(None, None, 0)
    _, losses = steps(None, expected, 3)
    for _, resumed in ranks(m, steps, STAGES[other], state, 3):
        assert resumed == pytest.approx(losses, abs=1e-12)
