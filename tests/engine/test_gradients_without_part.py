"""`p.grad` where a rank has no part of a parameter: a shard without elements, so that ranks may do alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import (
    NEAREST_GROUPS,
    SHARDED,
    STAGES,
    Stack,
    assert_all_same,
    in_parallel,
    in_worlds,
    loss_on,
    make,
    snapshot,
)

WORLDS = {
    **{f"{name}, N={n}": (strategy, n) for name, strategy in STAGES.items() for n in (2, 3)},
    **{
        f"{name}, {way}, N=3": (replace(strategy, accumulation=way), 3)
        for name, strategy in SHARDED.items()
        for way in ("each", "hold", "defer")
        if strategy.stage == 3 or way != "hold"
    },
    "zero 2, shard 2, N=4": (replace(STAGES["zero 2"], shard=2), 4),
    "zero 3, low, N=3": (replace(STAGES["zero 3"], precision="bfloat16"), 3),
}
SEVERAL = {name: world for name, world in WORLDS.items() if "low" not in name}
PARTIAL = {name: (strategy, n) for name, (strategy, n) in WORLDS.items() if strategy.stage}


def edited(model: nn.Module, kind: str) -> list[dict]:
    """Three steps, of two micro-batches, whose gradients are edited without asking whether they are there."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        if kind != "kept":
            optimizer.zero_grad()
        for index, batch in enumerate(pl.accumulate(model, [2 * step, 2 * step + 1])):
            loss_on(model, batch).backward()
            if index == 0 and kind == "between micro-batches":
                for p in model.parameters():
                    p.grad.mul_(0.5)
        for p in model.parameters():
            former = p.grad.clone()
            p.grad.mul_(0.5)
            p.grad = p.grad * 2 + former
            p.grad.add_(former, alpha=0.25).clamp_(-1, 1)
        optimizer.step()
        for p in model.parameters():
            p.grad.mul_(0.5)
    return [snapshot(model)]


@in_worlds(SEVERAL, NEAREST_GROUPS, kind=["zeroed", "kept", "between micro-batches"])
def test_elements_of_gradients_are_edited_on_every_rank(ranks, strategy, n, kind) -> None:
    alone = edited(pl.parallelize(make(), Strategy()), kind)
    for found in ranks(n, in_parallel, strategy, make, edited, kind):
        assert_all_same(found, alone)


READS: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "norm of order 1": lambda g, p: g.norm(1),
    "sum": lambda g, p: g.sum(),
    "shape": lambda g, p: g.shape,
    "projection": lambda g, p: (g * g.clone()).sum() / g.flatten().dot(g.flatten()),
    "noise": lambda g, p: g.add_(torch.randn_like(p)),
    "view": lambda g, p: g.view(-1),
    "float": lambda g, p: float(g.max()),
    "any": lambda g, p: bool(g.isnan().any()),
    "norms of what was computed": lambda g, p: torch._foreach_norm([2 * g, g + g]),
}


def read(model: nn.Module) -> list[tuple[str, Any]]:
    """What each way of reading gradients whole finds."""
    found: list[tuple[str, Any]] = []
    for name, function in READS.items():
        model.zero_grad()
        loss_on(model, 0).backward()
        torch.manual_seed(0)
        for p in model.parameters():
            each = function(p.grad, p)
            values = each if isinstance(each, (list, tuple)) else [each]
            found.append((name, [float(value.sum() if isinstance(value, Tensor) else value) for value in values]))
    return found


@in_worlds(PARTIAL)
def test_every_rank_reads_them_whole(ranks, strategy, n) -> None:
    expected = read(make())
    for found in ranks(n, in_parallel, strategy, make, read):
        assert [name for name, _ in found] == [name for name, _ in expected]
        for (name, values), (_, wanted) in zip(found, expected, strict=True):
            assert values == pytest.approx(wanted, rel=1e-9, abs=1e-12), name


def norms(model: nn.Module) -> list[float]:
    loss_on(model, 0).backward()
    return [p.grad.norm().item() for p in model.parameters() if p.grad is not None]


@in_worlds(PARTIAL)
def test_every_rank_knows_the_norm_of_the_whole(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, make, norms):
        assert found == pytest.approx(norms(make()), rel=1e-12)


class Half(Stack):
    """Leaves its last block unused."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.inner(x)))


def without(model: nn.Module) -> list[dict]:
    """Steps with weight decay, where some parameters have no gradient, of an optimizer that takes a closure."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5, momentum=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_on(model, 5)
        loss.backward()
        return loss

    for step in range(2):
        loss_on(model, step).backward()
        none = {name for name, p in model.named_parameters() if p.grad is None}
        assert none == {name for name, _ in model.named_parameters() if name.startswith(("blocks.1", "blocks.2"))}
        optimizer.step(closure if step else None)
        assert none == {name for name, p in model.named_parameters() if p.grad is None}
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    return [snapshot(model)]


@in_worlds({name: world for name, world in SEVERAL.items() if "," not in name[8:]})
def test_what_no_rank_used_has_none(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, make_half, without):
        assert_all_same(found, without(make_half()))


def make_half() -> nn.Module:
    return make(Half)


def kept_alone(model: nn.Module) -> list[dict]:
    """A list of gradients that is kept over steps, and edited after each backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_on(model, 0).backward()
    kept = [p.grad for p in model.parameters()]
    for step in range(1, 4):
        for gradient in kept:
            gradient.mul_(0.5)
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), kept, strict=True))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        loss_on(model, step).backward()
    return [snapshot(model)]


@in_worlds({name: world for name, world in SEVERAL.items() if "," not in name[8:]})
def test_a_list_of_gradients_stays_what_they_are(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, make, kept_alone):
        assert_all_same(found, kept_alone(make()))


def with_scaler(strategy: Strategy) -> int:
    """Unscales and clips gradients, and tells how many of them have no elements."""
    model = pl.parallelize(make(), strategy)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.1), pl.GradScaler(init_scale=4.0)
    scaler.scale(loss_on(model, 0)).backward()
    scaler.unscale_(optimizer)
    norm = pl.clip_grad_norm_(model, 1e-3)
    clipped = pl.engine_of(model).grad_norm()
    assert norm > 1e-3 and abs(clipped - 1e-3) < 1e-4
    empty = sum(p.grad.as_subclass(Tensor).numel() == 0 for p in model.parameters())
    scaler.step(optimizer)
    scaler.update()
    assert sum(bool(state) for state in optimizer.state.values()) == len(list(model.parameters())) - empty
    pl.release(model)
    return empty


@pytest.mark.parametrize("strategy", SHARDED.values(), ids=SHARDED)
def test_they_are_unscaled_and_clipped_and_have_no_states(ranks, strategy) -> None:
    assert any(ranks(3, with_scaler, strategy))
