"""States of shards that an optimizer loads by a way of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, data, make, shares, snapshot
from tests.quick import full


class Restoring(torch.optim.AdamW):
    """Looks for each state that it loads, as those of pytorch_optimizer do to give it back its dtype."""

    def load_state_dict(self, state_dict) -> None:
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, states in state_dict["state"].items():
            held = self.state[parameters[index]]
            self.state[parameters[index]] = {name: held[name].to(value.dtype) for name, value in states.items()}


pl.elementwise(Restoring)


def restored(strategy: Strategy | None) -> dict:
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = Restoring(model.parameters(), lr=0.01)
    for step in range(4):
        x, y = data(step, 12) if strategy is None else map(shares, data(step, 12))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return snapshot(model)


@pytest.mark.parametrize("name", ["zero 1", full("zero 3")])
def test_a_loader_that_looks_at_states_finds_those_of_its_rank(ranks, name: str) -> None:
    expected = restored(None)
    for found in ranks(2, restored, STAGES[name]):
        assert_same(found, expected)
