"""Norms of gradients, by parameter: what a rank gives to reductions, and what it has after them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.strategy import Strategy
from paceline.executor.gradient_norms import GradientNorms, NormRecords
from tests.quick import full

SMALL = {"bucket_mb": 1e-4}
STRATEGIES = [
    (Strategy(**SMALL), 2),
    (Strategy(zero=3, **SMALL), 2),
    full(Strategy(zero=1, **SMALL), 3),
    full(Strategy(zero=2, accumulation="each", **SMALL), 2),
    full(Strategy(zero=2, shard=2, **SMALL), 4),
    full(Strategy(precision="bfloat16", **SMALL), 2),
    full(Strategy(collective="parameter_server"), 2),
]


def make() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model.add_module("unused", nn.Identity())
    model[2].bias.requires_grad_(False)
    model.register_parameter("idle", nn.Parameter(torch.ones(5)))
    return model


def loss_of(model: nn.Module, rank: int, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    return model(torch.randn(5, 6, generator=generator)).square().sum() * (rank + 1)


def recorded(strategy: Strategy, micro_batches: int) -> tuple[list[str], list[GradientNorms | None], int]:
    """Of three steps, of which the second is recorded."""
    model = pl.parallelize(make(), strategy)
    engine, rank, found = pl.engine_of(model), pl.init().rank, []
    for step in range(3):
        model.zero_grad()
        engine.record_gradient_norms(step == 1)
        for micro_batch in pl.accumulate(model, range(micro_batches)):
            loss_of(model, rank, micro_batch).backward()
        found.append(engine.gradient_norms())
    names = [slot.spec.name for slot in engine.layout.slots]
    copies = engine.schedule.holders
    pl.release(model)
    return names, found, copies


def alone(rank: int, micro_batches: range) -> dict[str, Tensor]:
    """What one process has of a rank's share, of some of its micro-batches."""
    model = make()
    for micro_batch in micro_batches:
        loss_of(model, rank, micro_batch).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("strategy", "n"), STRATEGIES)
def test_norms_are_those_of_one_process(ranks, strategy: Strategy, n: int, micro_batches: int) -> None:
    every = ranks(n, recorded, strategy, micro_batches)
    close = {"rel": 0.03} if strategy.low else {"rel": 1e-5}
    whole = [alone(rank, range(micro_batches)) for rank in range(n)]
    names, copies = every[0][0], every[0][2]
    assert {"0.weight", "idle", "2.bias"} <= set(names) and "0.weight" in whole[0]
    for rank, (_, (before, taken, after), _) in enumerate(every):
        assert before is None and after is None and taken is not None
        parts = len(taken.local)
        assert parts in (1, micro_batches)
        for number, local in enumerate(taken.local):
            one = range(number, number + 1) if parts > 1 else range(micro_batches)
            own = alone(rank, one)
            for name, norm in zip(names, local, strict=True):
                assert norm == (pytest.approx(own[name].norm().item(), **close) if name in own else None), name
    for index, name in enumerate(names):
        reduced = [taken.reduced[index] for _, (_, taken, _), _ in every]
        norms = [norm for norm in reduced if norm is not None]
        if name not in whole[0]:
            assert not norms, name
            continue
        mean = torch.stack([own[name] for own in whole]).mean(0)
        assert math.hypot(*norms) / math.sqrt(copies) == pytest.approx(mean.norm().item(), **close), name
        if strategy.stage == 0 and copies == n:
            assert norms == [norms[0]] * n


def test_one_rank_has_none(ranks) -> None:
    ((_, found, _),) = ranks(1, recorded, Strategy(), 1)
    assert found == [None] * 3


def test_what_came_in_part_after_it_was_taken_is_not_told() -> None:
    records = NormRecords(3)
    records.is_on = True
    for micro_batch in range(2):
        records.begin(micro_batch)
        records.add_local({0: torch.tensor([3.0, 4.0]), 2: torch.full((4,), 1e4, dtype=torch.float16)})
    records.omit([0])
    records.take_reduced({2: torch.tensor([math.inf])})
    assert records.read() == GradientNorms([[5.0, None, 2e4], [None, None, 2e4]], [None, None, math.inf])
    records.begin(0)
    assert records.read() is None
