"""States of shards in lists and dictionaries of an optimizer's: a loop finds them whole, too."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, data, make, shares, snapshot
from tests.quick import full


@pl.elementwise
class Aggregated(torch.optim.Optimizer):
    """Averages momenta of different decay (Lucas et al. 2019), which it keeps by that, and the last two gradients."""

    def __init__(self, parameters, early: bool) -> None:
        super().__init__(parameters, {"lr": 0.05, "betas": (0.0, 0.5, 0.9)})
        if early:
            for p in self.param_groups[0]["params"]:
                self._begin(p)

    def _begin(self, p) -> None:
        state, betas = self.state[p], self.param_groups[0]["betas"]
        state["momenta"] = {beta: torch.zeros_like(p) for beta in betas}
        state["last"] = [torch.zeros_like(p) for _ in range(2)]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            if not self.state[p]:
                self._begin(p)
            state = self.state[p]
            state["last"].append(p.grad.clone())
            state["last"].pop(0)
            for beta, momentum in state["momenta"].items():
                momentum.mul_(beta).add_(state["last"][0] + state["last"][1])
                p.sub_(momentum, alpha=0.05 / 3)


def train(strategy: Strategy | None, early: bool) -> tuple[dict, list]:
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer, seen = Aggregated(model.parameters(), early), []
    for step in range(4):
        x, y = data(step, 12) if strategy is None else map(shares, data(step, 12))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            momenta = optimizer.state[p]["momenta"]
            seen.append([(list(each.shape), float(each.norm())) for each in momenta.values()])
            momenta[0.9].mul_(0.5)
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    return snapshot(model), seen


@pytest.mark.parametrize(
    ("name", "early", "n"), [("zero 1", False, 3), ("zero 3", False, 2), full("zero 2", True, 3), ("zero 1", True, 2)]
)
def test_they_are_what_one_process_has(ranks, name: str, early: bool, n: int) -> None:
    expected, states = train(None, early)
    for found, seen in ranks(n, train, STAGES[name], early):
        assert_same(found, expected)
        assert [[shape for shape, _ in each] for each in seen] == [[shape for shape, _ in each] for each in states]
        norms, known = ([norm for each in many for _, norm in each] for many in (seen, states))
        assert norms == pytest.approx(known, abs=1e-12)
