"""Hooks of an optimizer whose step is a part of another step, where parameters are shards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, loss_on, make, snapshot


@pl.elementwise
class Twice(torch.optim.SGD):
    """Each of its steps is two."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        super().step()


def trained(model: nn.Module) -> dict[str, Tensor]:
    torch.optim.SGD(model.parameters(), lr=0.1)  # whose step has hooks called from now on
    optimizer = Twice(model.parameters(), lr=0.1)

    @torch.no_grad()
    def shorten(*_: object) -> None:
        for p in model.parameters():
            p.mul_((0.9 / p.norm()).clamp(max=1.0))

    optimizer.register_step_post_hook(shorten)
    for step in range(2):
        loss_on(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


def on_ranks(strategy: Strategy) -> dict[str, Tensor] | str:
    model = pl.parallelize(make(), strategy)
    try:
        return trained(model)
    except EngineError as error:
        return str(error)
    finally:
        pl.shutdown()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("strategy", STAGES.values(), ids=STAGES)
def test_hooks_inside_a_step_find_whole_parameters_or_are_refused(ranks, strategy, n) -> None:
    for found in ranks(n, on_ranks, strategy):
        if strategy.stage:
            assert "whose hooks before or after a step would find this rank's shards" in found
        else:
            assert_same(found, trained(make()))
