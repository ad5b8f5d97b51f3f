"""A model recorded by torch.jit.trace or torch.export in the midst of training, such as for a logger's picture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import assert_same, data, make, snapshot
from tests.quick import full
from tests.ranks import RankPool

EXAMPLE = data(9, 4)[0]


def traced(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.jit.trace(model, (EXAMPLE,))  # with its own check, that a second trace is like the first


def exported(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.export.export(model, (EXAMPLE,)).module()


def trained(strategy: Strategy, record: Callable[[nn.Module], Any] | None) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Weights, and how far what a record computes is from what the model does, as it is recorded and at the end."""
    world = pl.init()
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    off, found = list[Tensor](), None
    for step in range(4):
        x, y = (part[world.rank :: world.world_size] for part in data(step, 12))
        loss = (model(x) - y).square().mean()
        if record is not None and step == 1 and world.rank == 0:
            # A logger is there on one rank.
            found = record(model)
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                torch.jit.trace(model, (EXAMPLE[:, 1:],))
            assert torch.is_grad_enabled()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if record is traced and found is not None:
            # What is under way to the weights arrives before the model computes with them, and not before a trace does.
            with torch.no_grad():
                expected = model(EXAMPLE)
                off.append((expected - found(EXAMPLE)).abs().max())
    weights = snapshot(model)
    pl.release(model)
    return weights, off


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("zero", [full(0), full(1), 2])
@pytest.mark.parametrize("record", [traced, full(exported)])
def test_training_goes_on_and_a_trace_computes_what_the_model_does(ranks: RankPool, zero: int, record: Any) -> None:
    strategy = Strategy(zero=zero, bucket_mb=1e-4)
    plain = ranks(2, trained, strategy, None)
    for (weights, off), (expected, _) in zip(ranks(2, trained, strategy, record), plain, strict=True):
        assert_same(weights, expected, atol=0)
        assert all(each < 1e-12 for each in off)


def refused(record: Callable[[nn.Module], Any]) -> tuple[str, float]:
    model = pl.parallelize(make(), Strategy(zero=3, bucket_mb=1e-4))
    found = record(copy.deepcopy(model))
    with torch.no_grad():
        off = float((found(EXAMPLE) - model(EXAMPLE)).abs().max())
    try:
        record(model)
    except EngineError as error:
        return str(error), off
    finally:
        pl.shutdown()
    return "", off


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("record", [traced, full(exported)])
def test_sharded_parameters_are_not_recorded(ranks: RankPool, record: Any) -> None:
    for told, off in ranks(2, refused, record):
        assert "with zero=3" in told and "copy.deepcopy(model)" in told
        assert off < 1e-12, "a plain copy is"
