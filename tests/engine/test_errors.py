"""Misuse is an error that says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.errors import EngineError, UserError
from tests.engine.models import (
    Stack,
    assert_all_same,
    assert_same,
    every_world,
    gradients,
    in_parallel,
    loss_on,
    make,
    several_ranks,
    train,
)
from tests.ranks import RankError, RankPool


def step_between(model: nn.Module) -> tuple[str, dict]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_on(model, 0).backward()
    loss = loss_on(model, 1)
    optimizer.step()
    with pytest.raises(EngineError) as caught:
        loss.backward()
    pl.reset(model)
    optimizer.zero_grad()
    loss_on(model, 1).backward()
    return str(caught.value), gradients(model)


@every_world
def test_an_optimizer_step_between_forward_and_backward_is_an_error_that_says_what_to_do(ranks, strategy, n) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_on(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_on(model, 1).backward()
    for message, found in ranks(n, in_parallel, strategy, Stack, step_between):
        assert "stepped between this forward and its backward" in message
        assert "call backward before optimizer.step()" in message
        assert_same(found, gradients(model))


def unsynchronised_step(model: nn.Module) -> tuple[str, list[dict]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        loss_on(model, 9).backward()
    with pytest.raises(EngineError) as caught:
        optimizer.step()
    pl.barrier()  # others may still need this rank for their backward
    pl.reset(model)
    return str(caught.value), train(model)


@several_ranks
def test_a_step_on_gradients_that_were_never_reduced_is_an_error_before_it_moves_a_weight(ranks, strategy, n) -> None:
    expected = train(make())
    for message, found in ranks(n, in_parallel, strategy, Stack, unsynchronised_step):
        assert "replicas would drift apart" in message
        assert_all_same(found, expected)


def different_models() -> str:
    world = pl.init()
    model = Stack(width=6 if world.rank != 1 else 8)
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(model)
    return str(caught.value)


def test_ranks_that_built_different_models_are_named_with_the_parameter(ranks) -> None:
    for message in ranks(3, different_models):
        assert 'rank 0, 2: ["inner.weight", [6, 4]' in message
        assert 'rank 1: ["inner.weight", [8, 4]' in message


def different_memory_formats() -> str:
    model = nn.Conv2d(3, 4, 3)
    if pl.init().rank == 1:
        model = model.to(memory_format=torch.channels_last)
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(model)
    return str(caught.value)


def test_ranks_whose_elements_lie_in_another_order_are_named(ranks) -> None:
    for message in ranks(2, different_memory_formats):
        assert "ranks built different models; the first difference is parameter or buffer 0" in message
        assert "[27, 9, 3, 1]" in message and "[27, 1, 9, 3]" in message


@pytest.mark.parametrize(
    ("model", "strategy", "words"),
    [
        (nn.Linear(1, 1), {"zero": 3}, "got {'zero': 3}: write pl.Strategy(**strategy)"),
        (nn.Linear(1, 1), 3, "got 3: write pl.Strategy(zero=2)"),
        ([nn.Linear(1, 1)], pl.Strategy(), "expected a model, a torch.nn.Module, got list"),
        (None, None, "got NoneType"),
    ],
)
def test_what_is_no_model_or_no_strategy_is_told_what_to_write(model: object, strategy: object, words: str) -> None:
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(model, strategy)
    assert words in str(caught.value)


def clipped_to(max_norm: float) -> None:
    model = pl.parallelize(nn.Linear(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    pl.clip_grad_norm_(model, max_norm)


@pytest.mark.parametrize("max_norm", [-1.0, pytest.param(float("nan"), marks=pytest.mark.full)])
def test_a_norm_that_would_turn_gradients_round_is_refused(ranks: RankPool, max_norm: float) -> None:
    with pytest.raises((RankError, UserError), match="expected the highest norm as a number from 0 up"):
        ranks(1, clipped_to, max_norm)


def clipped_of_another_model() -> str:
    model = pl.parallelize(nn.Linear(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    with pytest.raises(pl.UserError) as caught:
        pl.clip_grad_norm_(model, 1.0, [model.weight, *nn.Linear(2, 2).parameters()])
    pl.release(model)
    return str(caught.value)


def test_a_norm_of_parameters_that_are_not_the_models_is_refused(ranks: RankPool) -> None:
    (message,) = ranks(1, clipped_of_another_model)
    assert "expected parameters of the parallel model, such as an optimizer's group['params']" in message


def one_inside_another(inner_first: bool, zero: int) -> str:
    inner = Stack()
    outer = nn.Sequential(inner, nn.Linear(2, 2))
    first, second = (inner, outer) if inner_first else (outer, inner)
    pl.parallelize(first, pl.Strategy(zero=zero))
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(second, pl.Strategy(zero=zero))
    pl.release(first)
    return str(caught.value)


@pytest.mark.parametrize(("inner_first", "zero"), [(True, 3), (False, 3)])
def test_parallel_models_inside_each_other_are_refused(ranks, inner_first: bool, zero: int) -> None:
    for message in ranks(2, one_inside_another, inner_first, zero):
        assert "belongs to another parallel model already: parallelize the outermost model alone" in message
