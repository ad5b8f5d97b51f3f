"""Optimizers that edit parameters by their states between steps, as schedule-free ones do for evaluation."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.comm.transport import CommunicationError
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, Stack, assert_same, data, make, rows_of, snapshot
from tests.quick import full


@pl.elementwise
class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al. 2024): parameters are y in training, the average x in evaluation."""

    def __init__(self, params: object, way: str, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})
        self.way = way

    @torch.no_grad()
    def between(self, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    whole, z = p.data if self.way == "data" else p, self.state[p]["z"]
                    if self.way == "list":
                        torch._foreach_lerp_([whole], [z], weight)
                    else:
                        whole.lerp_(end=z, weight=weight)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            share = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", torch.clone(p))
                p.lerp_(end=z, weight=share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


class Vectors(nn.Module):
    """In one bucket, so that of each of its two parameters one of two ranks has all, and the other nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(32)), nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True) * self.first.sum() + self.second.sum()


def trained(model: nn.Module, way: str) -> dict[str, Tensor]:
    optimizer = ScheduleFree(model.parameters(), way)
    found = {}
    for step in range(3):
        if step == 2:
            optimizer.between(1 - 1 / 0.9)
            found = {f"evaluated {name}": value for name, value in snapshot(model).items()}
            optimizer.between(1 - 0.9)
        (0.01 * model(rows_of(model, data(step, 12)[0])).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found | snapshot(model)


def on_ranks(strategy: Strategy, cls: type[nn.Module], way: str) -> dict[str, Tensor] | str:
    model = pl.parallelize(make(cls), strategy if cls is Stack else Strategy(zero=strategy.zero))
    try:
        return trained(model, way)
    except (EngineError, CommunicationError) as error:
        return str(error)
    finally:
        pl.shutdown()


EDITED = [(Stack, "itself"), (Stack, "list"), (Vectors, "itself"), (Vectors, "data"), (Vectors, "list")]


@pytest.mark.parametrize(
    ("cls", "way", "n"),
    [
        *((cls, way, 3 if cls is Stack else 2) for cls, way in EDITED),
        *(full(cls, way, 2 if cls is Stack else 3) for cls, way in EDITED),
    ],
)
@pytest.mark.parametrize("strategy", STAGES.values(), ids=STAGES)
def test_parameters_edited_by_states_are_right_or_refused(ranks, strategy, cls, way, n) -> None:
    found = ranks(n, partial(on_ranks, strategy), cls, way)
    for each in found:
        if strategy.stage < 3:
            assert_same(each, trained(make(cls), way))
        else:
            # Who hears of it from another rank is told that it left.
            assert isinstance(each, str) and re.search("was edited|outside of forward|did not answer|has left", each)
