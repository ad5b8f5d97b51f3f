"""A model of which another parallel one has parts leaves these to it; tests/idioms/shared_parts.py trains with such."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import Stack, assert_same, data, shares, snapshot


class Headed(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


def pair() -> tuple[nn.Module, Headed]:
    torch.manual_seed(3)
    trunk = Stack().double()
    return Headed(trunk).double(), Headed(trunk).double()


def steps(first: Any, second: Any, models: tuple[nn.Module, ...], count: int = 3) -> list[torch.Tensor]:
    parameters = list({id(p): p for model in models for p in model.parameters()}.values())
    optimizer, norms = torch.optim.AdamW(parameters, 0.01, eps=1e-3), []
    for step in range(count):
        for index in range(2):
            x, y = (shares(part) for part in data(2 * step + index, 12))
            (F.mse_loss(first(x), y) + F.mse_loss(second(x), -y)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.2))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def trained_with(one: Strategy | None, other: Strategy | None) -> tuple[dict, dict, list]:
    first, second = pair()
    if one is not None and other is not None:
        pl.parallelize(first, one)
        pl.parallelize(second, other)
    norms = steps(first, second, (first, second))
    result = snapshot(first), snapshot(second), norms
    if one is not None:
        pl.release(second)
        pl.release(first)
    return result


ZERO = [Strategy(zero=zero, bucket_mb=1e-4) for zero in range(3)]
MIXES = [
    *itertools.product(ZERO, ZERO),
    *((strategy, strategy) for strategy in (Strategy(zero=0, recompute="unit"), Strategy(zero=2, recompute="unit"))),
    (ZERO[0], Strategy(zero=2, share_parameters=True)),
    (Strategy(zero=1, share_parameters=True), ZERO[2]),
    (ZERO[2], Strategy(zero=2, accumulation="defer")),
]


@pytest.mark.parametrize("strategies", MIXES, ids=str)
def test_each_has_a_strategy_of_its_own(ranks, strategies) -> None:
    first, second, norms = trained_with(None, None)
    for found in ranks(2, trained_with, *strategies):
        assert_same(found[0], first)
        assert_same(found[1], second)
        torch.testing.assert_close(found[2], norms)


def with_the_first_let_go() -> dict:
    first, second = pair()
    pl.parallelize(first, ZERO[2])
    pl.parallelize(second, ZERO[2])
    del first
    gc.collect()
    steps(second, second, (second,))
    state = snapshot(second)
    pl.release(second)
    return state


def test_the_first_sees_to_its_own_while_another_has_them(ranks) -> None:
    _, second = pair()
    steps(second, second, (second,))
    for state in ranks(2, with_the_first_let_go):
        assert_same(state, snapshot(second))


def refused(what: str, folder: Path) -> str:
    first, second = pair()
    pl.parallelize(first, ZERO[2])
    pl.parallelize(second, ZERO[1])
    optimizer = torch.optim.SGD(second.parameters(), 0.1)
    try:
        with pytest.raises((pl.UserError, pl.EngineError)) as caught:
            if what == "release":
                pl.release(first)
                second(torch.ones(2, 4).double()).sum().backward()
            elif what == "release before the step":
                second(torch.ones(2, 4).double()).sum().backward()
                pl.release(first)
                optimizer.step()
            elif what == "save":
                pl.save(folder / "step-1", second, optimizer, step=1)
            else:
                whole = Headed(first.trunk)
                if what == "meta":
                    whole.head = nn.Linear(2, 2, device="meta")
                other = {"precision": Strategy(precision="bfloat16"), "server": pl.SYSTEMS["parameter server"]}
                pl.parallelize(whole, other.get(what, ZERO[1]))
    finally:
        pl.release(second)
        if "release" not in what:
            pl.release(first)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("release", "trunk.inner.weight belonged to another parallel model, which was released since"),
        ("release before the step", "belonged to another parallel model, which was released since"),
        ("precision", "whose strategy.precision is float32, and this one's is bfloat16"),
        ("server", "whose strategy.collective is all_reduce, and this one's is parameter_server"),
        ("meta", "while other parts of this one are on the meta device"),
        ("save", "would lack these: parallelize one model that has both"),
    ],
)
def test_what_would_lose_them_is_refused(ranks, tmp_path: Path, what: str, words: str) -> None:
    for told in ranks(2, refused, what, tmp_path):
        assert words in told


def after_reset() -> tuple[dict, dict]:
    first, second = pair()
    pl.parallelize(first, ZERO[2])
    pl.parallelize(second, ZERO[2])
    try:
        (second(torch.ones(2, 4).double()).sum() + second(torch.ones(2, 5).double()).sum()).backward()
    except RuntimeError:
        pl.reset(second)
    try:
        hook = second.head.weight.register_hook(lambda gradient: 1 / 0)
        second(torch.ones(2, 4).double()).sum().backward()
    except ZeroDivisionError:
        hook.remove()
        pl.reset(second)
    steps(first, second, (first, second))
    states = snapshot(first), snapshot(second)
    pl.release(second)
    pl.release(first)
    return states


def test_a_reset_drops_gradients_of_both(ranks) -> None:
    first, second = pair()
    steps(first, second, (first, second))
    for found in ranks(2, after_reset):
        assert_same(found[0], snapshot(first))
        assert_same(found[1], snapshot(second))


class Normed(nn.Module):
    """A trunk with buffers that a graph keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(2)
        self.register_buffer("scale", torch.full((2,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale


def from_rank_0(strategy: Strategy | None) -> tuple[dict, dict, list]:
    """Both models from rank 0's weights, which are others than when the first was made parallel."""
    torch.manual_seed(6)
    trunk = Normed().double()
    first, second = Headed(trunk).double(), Headed(trunk).double()
    trunk.eval()
    if strategy is not None:
        pl.parallelize(first, strategy)
    if strategy is None or pl.init().rank == 0:
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.mul_(0.5)
    if strategy is not None:
        pl.parallelize(second, strategy)
    norms = steps(first, second, (first, second))
    if strategy is not None:
        x, y = (shares(part) for part in data(9, 12))
        F.mse_loss(second(x), y).backward()
        whole = pl.clip_grad_norm_(second, 1e9)
        assert torch.equal(whole, pl.engine_of(second).grad_norm())
        torch.testing.assert_close(whole, torch.nn.utils.clip_grad_norm_(second.parameters(), 1e9))
    result = snapshot(first), snapshot(second), norms
    if strategy is not None:
        pl.release(second)
        pl.release(first)
    return result


@pytest.mark.parametrize("strategy", ZERO, ids=str)
def test_all_have_rank_0s_values_and_a_graph_of_both_keeps_their_buffers(ranks, strategy: Strategy) -> None:
    first, second, norms = from_rank_0(None)
    for found in ranks(2, from_rank_0, strategy):
        assert_same(found[0], first)
        assert_same(found[1], second)
        torch.testing.assert_close(found[2], norms)
