"""Blocks that are computed again draw the same numbers again; what cannot be put back is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import EngineError
from paceline.models.recompute import recompute
from tests.models.test_as_before import build, trained


@dataclass(slots=True)
class Counter:
    calls: int = 0

    def __call__(self) -> float:
        self.calls += 1
        return 0.5 / self.calls


class Noise:
    """Draws and counts in an object of its own class."""

    def __init__(self) -> None:
        self.random, self.calls = np.random.RandomState(0), 0

    def __call__(self) -> float:
        self.calls += 1
        return float(self.random.rand()) + self.calls


class Drawing(nn.Module):
    """Computes with what another thing of its own gives it, each time something else."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.map, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.map(torch.tanh(self.map(x) * self.draw())))


@dataclass
class Averages:
    """Keeps tensors: one that it writes to, and the last that it has given."""

    mean: Tensor = field(default_factory=lambda: torch.ones(()))
    last: Tensor | None = None
    calls: int = 0

    def __call__(self) -> float:
        self.calls += 1
        self.mean.mul_(0.9)
        self.last = self.mean * self.calls
        return float(self.last)


class Outer:
    """Has what is no number, and another object that counts."""

    def __init__(self) -> None:
        self.device, self.inner = torch.device("cpu"), Counter()

    def __call__(self) -> float:
        return self.inner()


DRAWS: dict[str, Callable[[], Callable[[], float]]] = {
    "an object with slots": Counter,
    "an object with a generator": Noise,
    "an object with tensors": Averages,
    "an object in an object": Outer,
    "Python": lambda: random.Random(0).random,
    "numpy": lambda: np.random.default_rng(0).random,
    "numpy, as it was": lambda: np.random.RandomState(0).rand,
    "torch, in a closure": lambda: (lambda g: lambda: float(torch.rand((), generator=g)))(torch.Generator()),
}


@pytest.mark.parametrize("how", ["unit", "keep_attention"])
@pytest.mark.parametrize("name", DRAWS)
def test_training_is_the_same(name: str, how: Any) -> None:
    plain, again = (build(lambda: Drawing(DRAWS[name]())) for _ in range(2))
    recompute(list(again.blocks), how, 1)
    expected, found = trained(plain), trained(again)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize(
    "values",
    [iter([1.0]), itertools.cycle([1.0]), (x for x in (1.0,)), map(float, [1])],
    ids=lambda x: type(x).__name__,
)
def test_an_iterator_is_refused_by_name(values: Any) -> None:
    model = build(lambda: Drawing(values.__next__))
    recompute([model.blocks[1]], "unit", 1)
    with pytest.raises(EngineError, match=f"^Drawing: .* iterator .{type(values).__name__}.* leave this block out"):
        model(torch.ones(4, 8, dtype=torch.float64))
