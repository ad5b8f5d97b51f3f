"""A model that `pl.release` has given back is a plain one, whose forwards from before have no backward any more."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from torch.nn import functional as F

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import assert_same, data, gradients, make, shares, stages


def released(strategy: Strategy) -> dict:
    model = pl.parallelize(make(), strategy)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    sharded = pl.engine_of(model).schedule.shards > 1
    with pytest.warns(UserWarning, match="drops gradients that no optimizer has used") if sharded else nullcontext():
        pl.release(model)
    assert sharded == all(p.grad is None for p in model.parameters())
    model.zero_grad()
    F.mse_loss(model(x), y).backward()  # this rank's own again
    own = gradients(model)
    model.zero_grad()
    pl.parallelize(model, strategy)
    F.mse_loss(model(x), y).backward()
    reduced = gradients(model)
    pl.release(model)
    return {"own": own, "reduced": reduced}


@stages
def test_a_released_model_is_a_plain_one_and_can_be_made_parallel_again(ranks, strategy) -> None:
    model = make()
    x, y = data(0, 8)
    F.mse_loss(model(x), y).backward()
    for rank, result in enumerate(ranks(2, released, strategy)):
        assert_same(result["reduced"], gradients(model))
        alone = make()
        F.mse_loss(alone(x[rank::2]), y[rank::2]).backward()
        assert_same(result["own"], gradients(alone))


def released_between(strategy: Strategy) -> str:
    model = pl.parallelize(make(), strategy)
    x, y = (shares(part) for part in data(0, 8))
    loss = F.mse_loss(model(x), y)
    pl.release(model)
    with pytest.raises(EngineError) as refused:
        loss.backward()
    F.mse_loss(model(x), y).backward()
    return str(refused.value)


@stages
def test_a_backward_after_a_release_is_refused_and_a_new_forward_is_the_ranks_own(ranks, strategy) -> None:
    for told in ranks(2, released_between, strategy):
        assert told.startswith("pl.release ended this model's engine between this forward and its backward")


def released_before_a_backward(strategy: Strategy) -> dict:
    model = pl.parallelize(make(), strategy)
    pl.release(model)
    pl.parallelize(model, strategy)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    reduced = gradients(model)
    pl.release(model)
    return reduced


@stages
def test_one_that_was_released_before_a_backward_takes_no_part_in_one(ranks, strategy) -> None:
    model = make()
    x, y = data(0, 8)
    F.mse_loss(model(x), y).backward()
    for found in ranks(2, released_before_a_backward, strategy):
        assert_same(found, gradients(model))
