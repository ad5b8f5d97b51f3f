"""N ranks equal one process when collectives start and end late: every stage, accumulation and way to recompute."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import SYSTEMS, Strategy
from tests.engine.late_streams import late_streams
from tests.engine.models import HYBRID, STAGES, assert_same, make, rows_of, snapshot
from tests.quick import diagonal, some

STEPS, MICRO_BATCHES = 3, 3


class Net(nn.Module):
    """Blocks that are gathered, a tied head, and a scalar that a container holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3))
        self.head = nn.Linear(6, 4, bias=False)
        self.out = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.out(self.head(x))


def batch(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, size, generator=generator, dtype=torch.float64) for size in (4, 2))  # type: ignore[return-value]


def train(model: nn.Module, outside: bool = False) -> dict[str, Tensor]:
    """Everything that a loop may ask of a model between updates, on a plain model or a parallel one.

    Args:
        model: Is trained for `STEPS` steps.
        outside: Whether the loss uses a parameter itself, too.
    """
    engine = getattr(model, "_paceline_engine", None)
    # Two optimizers: the second one updates what comes first while the first one's update is still on its way.
    first = [model.scale, *model.inner.parameters(), *model.blocks[0].parameters()]  # type: ignore[union-attr, operator, index]
    others = [p for p in model.parameters() if all(p is not other for other in first)]
    optimizers = [torch.optim.AdamW(others, lr=1e-2), torch.optim.SGD(first, lr=0.1, momentum=0.9)]
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        x, y = (rows_of(model, part) for part in batch(step, 24))
        pairs = list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True))
        for index, (xs, ys) in enumerate(pl.accumulate(model, pairs) if engine else pairs):
            loss = F.mse_loss(model(xs), ys)
            if step == 2:
                # From then on backward is not overlapped: gradients are complete when it is over.
                loss = loss + 0.1 * model(-xs).square().mean()
            if outside:
                loss = loss + 0.01 * model.get_parameter("blocks.1.0.weight").square().sum()
            (loss / MICRO_BATCHES).backward()
            if step and index == 0:
                change_gradients(model, step)
        found[f"step {step}: reduced norm"] = engine.norm.as_reduced() if engine else norm(model)
        clipped = pl.clip_grad_norm_(model, 0.5) if engine else nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found[f"step {step}: norm"] = clipped
        found[f"step {step}: an evaluation before the update"] = evaluate(model)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step != 1:
            if engine is None or not engine.schedule.shards_parameters:
                with torch.no_grad():
                    found[f"step {step}: a weight"] = model.get_parameter("blocks.0.2.weight").square()
            found[f"step {step}: an evaluation"] = evaluate(model)
    return found | snapshot(model)


def change_gradients(model: nn.Module, step: int) -> None:
    """A loop scales what it has so far, or drops some of it."""
    if step == 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    else:
        model.get_parameter("blocks.1.0.bias").grad = None
        model.get_parameter("inner.weight").grad = None


def norm(model: nn.Module) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


@torch.no_grad()
def evaluate(model: nn.Module) -> Tensor:
    return model(batch(99, 5)[0])


@functools.cache
def expected(outside: bool = False) -> dict[str, Tensor]:
    return train(make(Net), outside)


def late(strategy: Strategy, outside: bool = False) -> dict[str, Any]:
    with late_streams():
        model = pl.parallelize(make(Net), strategy)
        found = train(model, outside)
        pl.release(model)
    return found


def assert_as_one(found: dict[str, Any], outside: bool = False) -> None:
    """Every number is that of one process."""
    wanted = {name: value for name, value in expected(outside).items() if name in found}
    assert_same(found, wanted)
    # With sharded parameters no weight is looked at outside of a pass.
    assert {name.partition(": ")[2] for name in expected(outside).keys() - found.keys()} <= {"a weight"}


LATE = {name: replace(strategy, bucket_mb=3e-4) for name, strategy in STAGES.items()}
"""Several buckets, yet few enough that sleeping for each takes little time."""

POLICIES = {
    f"{name}, {accumulation}": replace(strategy, accumulation=accumulation)  # type: ignore[arg-type]
    for name, strategy in LATE.items()
    for accumulation in ("auto", "each", "defer", "hold")
    if accumulation != "hold" or strategy.gathers
}

WORLDS = {
    "zero 1, shared parameters": (replace(LATE["zero 1"], share_parameters=True), 2),
    "parameter server": (SYSTEMS["parameter server"], 2),
    "zero 2, 2 x 2": (replace(HYBRID["zero 2, 2 x 2"], bucket_mb=3e-4), 4),
    "zero 3, 2 x 2": (replace(HYBRID["zero 3, 2 x 2"], bucket_mb=3e-4), 4),
}


QUICK = {
    ("zero 0, auto", "none"),
    ("zero 1, each", "unit"),
    ("zero 2, auto", "unit"),
    ("zero 2, defer", "none"),
    ("zero 3, auto", "none"),
    ("zero 3, hold", "unit"),
}


@pytest.mark.parametrize(("name", "recompute"), diagonal(POLICIES.keys(), ["none", "unit"], quick=QUICK))
def test_late_collectives_change_no_number(ranks, name: str, recompute: str) -> None:
    for found in ranks(2, late, replace(POLICIES[name], recompute=recompute)):  # type: ignore[arg-type]
        assert_as_one(found)


@pytest.mark.full
@pytest.mark.parametrize("name", WORLDS)
def test_nor_do_those_of_other_worlds(ranks, name: str) -> None:
    strategy, n = WORLDS[name]
    for found in ranks(n, late, strategy):
        assert_as_one(found)


@pytest.mark.parametrize("name", some(LATE, {"zero 0", "zero 3"}))
def test_nor_where_a_parameter_is_used_outside_of_its_unit(ranks, name: str) -> None:
    for found in ranks(2, late, LATE[name], True):
        assert_as_one(found, True)
