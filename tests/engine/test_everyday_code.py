"""What people write around a model: data assigned, states reloaded, files, inference first, whole checkpoints."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import (
    SHARDED,
    STAGES,
    WORLDS,
    Stack,
    assert_all_same,
    assert_same,
    every_world,
    in_parallel,
    loss_on,
    make,
    rows,
    snapshot,
    train,
)
from tests.quick import full

SHARED, _ = WORLDS["zero 2, shared parameters"]


def assigned(strategy: Strategy) -> list[dict]:
    model = pl.parallelize(make(), strategy)
    before = snapshot(model)
    with pl.full_parameters(model):
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
    after = snapshot(model)
    pl.release(model)
    return [{name: value / before[name] for name, value in after.items()}]


@every_world
def test_data_assigned_to_full_parameters_is_kept(ranks, strategy, n) -> None:
    for (found,) in ranks(n, assigned, strategy):
        assert all(torch.allclose(value, torch.full_like(value, 2.0), equal_nan=True) for value in found.values())


def frozen_edited() -> float:
    model = make()
    model.inner.requires_grad_(False)
    before = model.inner.weight.clone()
    pl.parallelize(model, SHARED)
    with pl.full_parameters(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    pl.barrier()
    found = (model.state_dict()["inner.weight"] - before).max().item()
    pl.release(model)
    return found


def test_frozen_parameters_are_edited_once_where_ranks_share_memory(ranks) -> None:
    assert ranks(2, frozen_edited) == pytest.approx([1.0, 1.0])


def reloaded(strategy: Strategy, reloads: bool) -> list[dict]:
    model = pl.parallelize(make().float(), strategy)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(4):
        if step == 2 and reloads:
            optimizer.load_state_dict(optimizer.state_dict())
        x, y = rows(model, step)
        F.mse_loss(model(x.float()).float(), y.float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [snapshot(model)]
    pl.release(model)
    return found


@pytest.mark.parametrize("zero", [0, full(1), full(2), 3])
def test_states_of_low_precision_are_loaded_as_they_were_saved(ranks, zero) -> None:
    strategy = Strategy(zero=zero, precision="bfloat16", bucket_mb=1e-4)
    for found, expected in zip(ranks(2, reloaded, strategy, True), ranks(2, reloaded, strategy, False), strict=True):
        assert found[0].keys() == expected[0].keys()
        assert all(torch.equal(value, expected[0][name]) for name, value in found[0].items())


class Normalised(nn.Linear):
    """Gives its own weight other data in each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = F.normalize(self.weight.data, dim=1)
        return super().forward(x)


def normalises() -> nn.Module:
    return nn.Sequential(Normalised(4, 6), nn.Tanh(), Normalised(6, 2))


@pytest.mark.parametrize("strategy", [*STAGES.values(), SHARED], ids=[*STAGES, "shared parameters"])
def test_data_assigned_in_a_forward_counts_or_is_refused(ranks, strategy) -> None:
    lost = strategy.zero == 3 or strategy.share_parameters
    for found in ranks(2, refused_or_trained, strategy):
        if lost:
            assert "pl.full_parameters(model)" in found
        else:
            assert_all_same(found, train(make(normalises)))


def refused_or_trained(strategy: Strategy) -> list[dict] | str:
    model = pl.parallelize(make(normalises), strategy)
    try:
        return train(model)
    except (EngineError, pl.CommunicationError) as error:
        return str(error)
    finally:
        pl.reset(model)
        pl.release(model)


def in_a_file(strategy: Strategy) -> list[dict]:
    model = pl.parallelize(make(), strategy)
    loss_on(model, 0).backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    same = [snapshot(model), snapshot(loaded)]
    loaded(torch.zeros(1, 4, dtype=torch.float64)).sum().backward()
    pl.release(model)
    return same


@every_world
def test_a_model_in_a_file_is_a_plain_one(ranks, strategy, n) -> None:
    for ours, loaded in ranks(n, in_a_file, strategy):
        assert_all_same([loaded], [ours])


def looked_at_first(model: nn.Module) -> list[dict]:
    with torch.inference_mode():
        model(rows(model, 9)[0])
    return train(model)


@every_world
def test_a_look_in_inference_mode_before_training(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, Stack, looked_at_first):
        assert_all_same(found, train(make()))


def checkpointed_whole(model: nn.Module) -> list[dict]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = rows(model, step)
        F.mse_loss(checkpoint(model, x.requires_grad_(), use_reentrant=True), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [snapshot(model)]


@every_world
def test_one_reentrant_checkpoint_around_the_whole_model(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, Stack, checkpointed_whole):
        assert_all_same(found, checkpointed_whole(make()))


def gave_several(strategy: Strategy) -> None:
    """A generator of micro-batches that is left open over a reset ends nobody else's deferral."""
    model = pl.parallelize(make(), strategy)
    first = iter(pl.accumulate(model, [1, 2, 3]))
    next(first)
    pl.reset(model)
    second = iter(pl.accumulate(model, [1, 2]))
    next(second)
    first.close()
    loss_on(model, 0).backward()
    assert not pl.engine_of(model).state.synchronises
    second.close()
    pl.reset(model)
    pl.release(model)


@pytest.mark.parametrize("strategy", SHARDED.values(), ids=SHARDED)
def test_micro_batches_left_over_a_reset(ranks, strategy) -> None:
    ranks(2, gave_several, strategy)


class Branches(nn.Module):
    """Layers that run at the same time, in threads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.pool = [ThreadPoolExecutor(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.pool[0].map(lambda layer: layer(x), self.layers))).sum(0)


def in_threads(strategy: Strategy | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Branches()
    if strategy is not None:
        pl.parallelize(model, strategy)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(20):
        model(torch.full((2, 4), step / 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.setswitchinterval(interval)
    model.pool.pop().shutdown()
    state = snapshot(model)
    if strategy is not None:
        pl.release(model)
    return state


@pytest.mark.parametrize("zero", [0, 2])
def test_branches_of_a_forward_may_run_in_threads(ranks, zero) -> None:
    for state in ranks(2, in_threads, Strategy(zero=zero, bucket_mb=1e-4)):
        assert_same(state, in_threads(None))
