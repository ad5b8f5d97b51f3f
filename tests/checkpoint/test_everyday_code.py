"""Loops as users write them, saved and gone on with elsewhere, equal those that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from tests.engine.models import assert_same, snapshot
from tests.quick import diagonal


def rows(step: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a step, of 12 over all ranks."""
    world, generator = pl.init(), torch.Generator().manual_seed(step)
    x, y = (torch.randn(12, width, generator=generator, dtype=torch.float64) for width in (6, 2))
    own = slice(12 * world.rank // world.world_size, 12 * (world.rank + 1) // world.world_size)
    return x[own], y[own]


def generative(folder: Path, zero: int, first: int, last: int) -> dict[str, Tensor]:
    """Two models that train each other, with an optimizer each, saved one by one."""
    torch.manual_seed(0)
    strategy = pl.Strategy(zero=zero)
    makes = pl.parallelize(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double(), strategy)
    judges = pl.parallelize(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double(), strategy)
    both = {"makes": (makes, torch.optim.Adam(makes.parameters(), 1e-2))}
    both["judges"] = (judges, torch.optim.Adam(judges.parameters(), 1e-2))
    for name, (model, optimizer) in both.items():
        assert not first or pl.load(folder / name, model, optimizer).step == first
    for step in range(first, last):
        x, y = rows(step)
        (F.softplus(-judges(y)).mean() + F.softplus(judges(makes(x).detach())).mean()).backward()
        both["judges"][1].step()
        both["judges"][1].zero_grad()
        F.softplus(-judges(makes(x))).mean().backward()
        both["makes"][1].step()
        for _, optimizer in both.values():
            optimizer.zero_grad()
    if not first:
        for name, (model, optimizer) in both.items():
            pl.save(folder / name / f"step-{last}", model, optimizer, step=last)
    return {f"{name}.{key}": value for name, (model, _) in both.items() for key, value in snapshot(model).items()}


class Growing(nn.Module):
    """Has a layer that runs in later steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.grown = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.late(x) if self.grown else x)


def averaged(folder: Path, zero: int, first: int, last: int) -> dict[str, Tensor]:
    """Accumulates, clips, warms up and keeps an average of the weights in `extra`; saves in the background."""
    torch.manual_seed(1)
    model = pl.parallelize(Growing().double(), pl.Strategy(zero=zero, bucket_mb=1e-4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: min(1.0, (count + 1) / 3))
    average = pl.load(folder, model, optimizer, scheduler=scheduler).extra["average"] if first else snapshot(model)
    for step in range(first, last):
        model.grown = step >= 3
        x, y = rows(step)
        for part in pl.accumulate(model, [slice(0, len(x) // 2), slice(len(x) // 2, None)]):
            (F.mse_loss(model(x[part]), y[part], reduction="sum") * pl.init().world_size / 12).backward()
        pl.clip_grad_norm_(model, 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average = {name: 0.9 * average[name] + 0.1 * value for name, value in snapshot(model).items()}
    if not first:
        extra = {"average": average}
        pl.save(
            folder / "step-3", model, optimizer, step=last, scheduler=scheduler, extra=extra, background=True
        ).wait()
    return {**snapshot(model), **{f"average.{name}": value for name, value in average.items()}}


class Reparametrised(nn.Module):
    """A weight norm, a frozen layer norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.LayerNorm(8)
        self.places, self.last = nn.Embedding(12, 8), nn.Linear(8, 2)
        self.norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)) + self.places.weight.mean(0)))


def several(folder: Path, zero: int, first: int, last: int) -> dict[str, Tensor]:
    """Two optimizers of one model, with a group that was added later."""
    torch.manual_seed(2)
    model = pl.parallelize(Reparametrised().double(), pl.Strategy(zero=zero))
    one = torch.optim.SGD(model.first.parameters(), 0.05, momentum=0.9, nesterov=True)
    one.add_param_group({"params": list(model.last.parameters()), "lr": 0.01})
    other = torch.optim.Adagrad(model.places.parameters(), 0.05, initial_accumulator_value=0.1)
    assert not first or pl.load(folder, model, [one, other]).step == first
    for step in range(first, last):
        x, y = rows(step)
        F.mse_loss(model(x), y).backward()
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    if not first:
        pl.save(folder / "step-3", model, [one, other], step=last)
    return snapshot(model)


class Tied(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(7, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def from_meta(folder: Path, zero: int, first: int, last: int) -> dict[str, Tensor]:
    """Goes on with a model that is made on the meta device, evaluates it and reads it before it trains."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta" if first else "cpu"):
            model = Tied()
    finally:
        torch.set_default_dtype(torch.float32)
    pl.parallelize(model, pl.Strategy(zero=zero))
    optimizer = torch.optim.NAdam(model.parameters(), 1e-2)
    if first:
        pl.load(folder, model, optimizer)
        with torch.no_grad():
            model.eval()(torch.arange(7))
        with pl.full_parameters(model):
            assert model.words.weight.isfinite().all()
    for step in range(first, last):
        tokens = rows(step)[0].mul(3).long().remainder(7)
        F.cross_entropy(model.train()(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if not first:
        pl.save(folder / "step-3", model, optimizer, step=last)
    return snapshot(model)


LOOPS = {loop.__name__: loop for loop in (generative, averaged, several, from_meta)}
JOBS = {f"N={n}, zero {zero}": (n, zero) for n, zero in ((1, 0), (2, 1), (2, 3), (3, 2), (3, 0))}
QUICK = {
    ("generative", "N=2, zero 1", "N=3, zero 0"),
    ("averaged", "N=3, zero 2", "N=2, zero 3"),
    ("several", "N=2, zero 3", "N=1, zero 0"),
    ("from_meta", "N=1, zero 0", "N=2, zero 3"),
}


@pytest.mark.parametrize(("loop", "before", "after"), diagonal(LOOPS, JOBS, JOBS, quick=QUICK))
def test_loops_go_on_elsewhere(ranks, tmp_path: Path, loop, before, after) -> None:
    (expected,) = ranks(1, loop, tmp_path / "alone", 0, 0, 5)
    ranks(before[0], loop, tmp_path / "saved", before[1], 0, 3)
    for found in ranks(after[0], loop, tmp_path / "saved", after[1], 3, 5):
        assert_same(found, expected)
