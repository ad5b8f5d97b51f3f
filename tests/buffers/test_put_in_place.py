"""Data that a loop put in the place of parameters', by `p.data = ...`, with and without keeping what they were."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import PARALLEL, STAGES, Stack, assert_all_same, in_parallel, loss_on, make, snapshot

WHOLE = pytest.mark.parametrize("stage", ["zero 0", "zero 1", "zero 2"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    loss_on(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def put(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * factor


def averaged(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Trains on what was put there; between steps evaluates and saves other weights, and puts the former back."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for seed in range(3):
        step(model, optimizer, seed)
        put(model, 1.1)
        step(model, optimizer, seed)
        kept = [parameter.data for parameter in model.parameters()]
        put(model, 0.5)
        with torch.no_grad():
            loss_on(model, seed)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data = value
        del kept, value
        found.append(snapshot(model))
    return found


@WHOLE
def test_what_is_put_there_counts_and_what_is_put_back_does(ranks, stage) -> None:
    for found in ranks(2, in_parallel, STAGES[stage], Stack, averaged):
        assert_all_same(found, averaged(make()))


def trained_on_others(strategy: Strategy) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    kept = model.head.weight.data
    before = snapshot(model)
    model.head.weight.data = kept + 1
    with pytest.raises(EngineError) as caught:
        step(model, optimizer, 1)
    message = str(caught.value)
    model.head.weight.data = kept
    return message, before, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("place", ["zero 1", "zero 2", "parameter server"])
def test_what_was_kept_is_not_written_over(ranks, place) -> None:
    for message, before, after in ranks(2, trained_on_others, PARALLEL[place]):
        assert "head.weight was given other data" in message and "keep p.data.clone()" in message
        assert all(torch.equal(value, before[name]) for name, value in after.items())


def frozen_given_data(strategy: Strategy, wide: bool) -> list[float]:
    """What a frozen parameter is everywhere, after a loop has given it other data, as a momentum encoder's does."""

    def mean(value: torch.Tensor) -> float:
        return value.detach().float().mean().item()

    model = make()
    frozen = model.head.bias.requires_grad_(False)
    model = pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with torch.no_grad():
        frozen.data = torch.full_like(frozen.data, 2.0, dtype=torch.float32 if wide else None)
    if not wide:
        step(model, optimizer, 0)
    found = [mean(frozen), mean(model.state_dict()["head.bias"]), mean(copy.deepcopy(model).head.bias)]
    with pl.full_parameters(model):
        found.append(mean(frozen))
        with torch.no_grad():
            frozen.add_(1)
    return [*found, mean(frozen), mean(pl.release(model).head.bias)]


@pytest.mark.parametrize("wide", [False, True])
@WHOLE
def test_a_frozen_one_in_low_precision_is_what_it_was_given(ranks, stage, wide) -> None:
    strategy = replace(STAGES[stage], precision="bfloat16")
    assert ranks(2, frozen_given_data, strategy, wide) == [[2.0] * 4 + [3.0] * 2] * 2
