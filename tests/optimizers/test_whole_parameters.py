"""Optimizers that look at whole parameters equal one process where a rank may hold these, and are refused elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import HYBRID, STAGES, assert_same, data, make, shares, snapshot
from tests.quick import diagonal


def optimised_whole(strategy: Strategy | None, name: str) -> dict:
    """With an optimizer that looks at whole parameters, and one for what is left."""
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    matrices = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if n.endswith("bias")]
    cls = Normalised if name == "Normalised" else getattr(torch.optim, name)
    optimizers = [cls(list(model.parameters()), lr=0.1)] if name == "LBFGS" else [cls(matrices, lr=0.01)]
    optimizers += [] if name == "LBFGS" else [torch.optim.SGD(others, lr=0.1)]
    for step in range(3):
        x, y = data(step, 12)
        x, y = (shares(x), shares(y)) if strategy is not None else (x, y)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        if name == "LBFGS":
            optimizers[0].step(closure)
        else:
            closure()
            for optimizer in optimizers:
                optimizer.step()
    return snapshot(model)


WHERE_WHOLE = {
    **{name: STAGES[name] for name in ("zero 0", "zero 1", "zero 2")},
    "zero 2, shared parameters": replace(STAGES["zero 2"], share_parameters=True),
    **{name: strategy for name, strategy in HYBRID.items() if strategy.zero != 3},
}
"""Strategies by which a rank may hold all of a model."""


class Normalised(torch.optim.SGD):
    """Takes steps of unit length over a whole parameter, so it cannot work on a shard."""

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad / p.grad.norm())


@pytest.mark.filterwarnings("ignore:.*may need whole parameters")
@pytest.mark.parametrize(("name", "strategy"), diagonal(["LBFGS", "Adafactor", "Muon", "Normalised"], {**WHERE_WHOLE}))
def test_optimizers_of_whole_parameters_equal_one_process(ranks, name, strategy) -> None:
    expected = optimised_whole(None, name)
    count = 4 if 1 < strategy.shards(4) < 4 else 2
    for state in ranks(count, optimised_whole, strategy, name):
        # Muon rounds to bf16 inside.
        assert_same(state, expected, atol={"Adafactor": 1e-12, "LBFGS": 1e-8, "Normalised": 1e-12}.get(name, 2e-2))


def told_of_memory() -> list[str]:
    model = pl.parallelize(make(), STAGES["zero 1"])
    x, y = (shares(part) for part in data(0, 8))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            F.mse_loss(model(x), y).backward()
            Normalised(model.parameters(), lr=0.1).step()
    pl.release(model)
    return [str(each.message) for each in told]


def test_who_holds_all_states_by_such_an_optimizer_is_told_once(ranks) -> None:
    for messages in ranks(2, told_of_memory):
        assert sum("vouch for it with pl.elementwise(Normalised)" in message for message in messages) <= 1


def refused(name: str) -> str:
    model = pl.parallelize(make(), STAGES["zero 3"])
    matrices = [p for n, p in model.named_parameters() if n.endswith("weight")]
    optimizer = Normalised(matrices) if name == "Normalised" else getattr(torch.optim, name)(matrices)
    x, y = (shares(part) for part in data(0, 8))

    def closure() -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    closure()
    with pytest.raises(pl.UserError) as caught:
        optimizer.step(closure if name == "LBFGS" else None)
    pl.release(model)
    return str(caught.value)


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "Normalised"])
def test_where_no_rank_is_to_hold_all_they_are_refused_with_what_serves_them(ranks, name) -> None:
    for message in ranks(2, refused, name):
        assert "set strategy.zero to 2 or less" in message
        assert "pl.elementwise" in message
