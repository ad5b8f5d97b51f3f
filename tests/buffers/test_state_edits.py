"""What is written to a state_dict is what one process makes of it, or is refused before it could be missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, assert_same, shares
from tests.quick import diagonal

Edit = Callable[[nn.Module], Any]


def loaded_by_name(model: nn.Module) -> None:
    own = model.state_dict()
    for name, value in {"0.bias": torch.full((4,), 0.5).double()}.items():
        own[name].copy_(value)


def a_row(model: nn.Module) -> None:
    model.state_dict()["0.weight"][1].zero_()


def all_scaled(model: nn.Module) -> None:
    torch._foreach_mul_(list(model.state_dict().values()), 0.5)


def of_a_part(model: nn.Module) -> None:
    model[1].state_dict()["weight"].mul_(2)


def loaded_back(model: nn.Module) -> None:
    state = model.state_dict()
    state["0.weight"][1].zero_()
    model.load_state_dict(state)


def only_read(model: nn.Module) -> None:
    copy = {name: value.clone().mul_(2) for name, value in model.state_dict().items()}
    model.state_dict()["0.weight"].sum()
    assert copy


EDITS = {edit.__name__: edit for edit in (loaded_by_name, a_row, all_scaled, of_a_part, loaded_back, only_read)}


def trained(strategy: Strategy | None, name: str) -> dict[str, Tensor] | str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    try:
        for step in range(3):
            x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
            model(shares(x) if strategy is not None else x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < 2:
                EDITS[name](model)
        return {key: value.clone() for key, value in model.state_dict().items()}
    except EngineError as error:
        return str(error)
    finally:
        if strategy is not None:
            pl.shutdown()


@pytest.mark.parametrize(("strategy", "name"), diagonal(STAGES, list(EDITS)))
def test_a_written_state_counts_or_is_refused(ranks, strategy, name) -> None:
    expected = trained(None, name)
    for found in ranks(2, trained, strategy, name):
        if strategy.stage == 3 and name not in ("loaded_back", "only_read"):
            assert isinstance(found, str) and "was edited, but this rank updates only its shard of it" in found
        else:
            assert_same(found, expected)
