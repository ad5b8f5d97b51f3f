"""States that are no numbers of a parameter's elements come back as they were, whatever their shape is like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from tests.engine.models import STAGES, assert_same, snapshot
from tests.quick import full


class Factored(torch.optim.Optimizer):
    """Keeps sums of rows and columns, a vector of all elements, and of a number a vector of one."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            squares = p.grad.square()
            if not (state := self.state[p]):
                state["rows"] = squares.new_zeros(p.shape[:1] or (1,))
                state["columns"] = squares.new_zeros(p.shape[-1:] or (1,))
                state["line"] = squares.new_zeros(p.numel())
            state["rows"] += squares.reshape(state["rows"].numel(), -1).sum(1)
            state["columns"] += squares.reshape(-1, state["columns"].numel()).sum(0)
            state["line"] += squares.reshape(-1)
            scale = 1 + state["line"].reshape(p.shape) + state["rows"].sum() + state["columns"].sum()
            p.sub_(p.grad / scale, alpha=0.05)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.scale = nn.Linear(16, 2), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * self.scale


def train(name: str, folder: Path | None) -> tuple[dict, list[dict[str, tuple[int, ...]]]]:
    model = pl.parallelize(Scaled().double(), STAGES[name])
    optimizer = Factored(model.parameters())
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        if folder is not None and step == 2:
            pl.save(folder, model, optimizer, step=step)
            optimizer = Factored(model.parameters())
            pl.load(folder, model, optimizer)
        model(torch.randn(4, 16, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shapes = [{name: tuple(each.shape) for name, each in optimizer.state[p].items()} for p in model.parameters()]
    return snapshot(model), shapes


@pytest.mark.parametrize("name", [full("zero 0"), "zero 1", full("zero 2")])
@pytest.mark.filterwarnings("ignore:Factored may need")
def test_a_statistic_as_long_as_a_shard_is_none_of_its_elements(ranks, tmp_path: Path, name: str) -> None:
    # Of the matrix of 2 x 16 each of two ranks updates 16 elements, as many as there are columns.
    through = ranks(2, train, name, None)
    on = ranks(2, train, name, tmp_path / "step")
    for (weights, shapes), (expected, kept) in zip(on, through, strict=True):
        assert shapes == kept
        assert_same(weights, expected, 0.0)


def wraps_without_init(folder: Path) -> str:
    """What is said of one that wraps another and never called `Optimizer.__init__`."""

    class Looking(torch.optim.Optimizer):
        def __init__(self, inner) -> None:
            self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

        def state_dict(self) -> dict:
            return {"inner": self.inner.state_dict(), "looked": 1}

    model = pl.parallelize(Scaled())
    with pytest.raises(pl.UserError) as caught:
        pl.save(folder, model, Looking(torch.optim.SGD(model.parameters(), lr=0.1)), step=1)
    return str(caught.value)


def test_what_wraps_another_is_told_what_would_be_lost(ranks, tmp_path: Path) -> None:
    (told,) = ranks(1, wraps_without_init, tmp_path / "step")
    assert told.startswith("Looking has a state_dict of its own, with inner, looked, which would be lost")
