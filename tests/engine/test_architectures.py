"""What models do inside that engines stumble over, in small, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import assert_same, data, make, shares, snapshot
from tests.quick import diagonal
from tests.ranks import RankPool


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Five blocks; what is in between differs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(6, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.head(self.through(self.embed(x)))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Passing(Blocks):
    """The first block makes a bias that all use and hand on, as T5's do: an output that a unit was given."""

    class Biased(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.bias = nn.Parameter(torch.ones(6)) if first else None

        def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            y = self.inner(x)
            if bias is None:
                assert self.bias is not None
                bias = self.bias * 2
            return x + torch.tanh(y + bias), bias

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passing.Biased(index == 0) for index in range(4))

    def through(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class Equal(Blocks):
    """Many small units of one size beside a large one: ranks must keep the same few gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(9))
        self.wide = nn.Sequential(nn.Linear(6, 160), nn.Tanh(), nn.Linear(160, 6))

    def through(self, x: Tensor) -> Tensor:
        return super().through(self.wide(x))


class Normed(Blocks):
    """Units that compute their weight in a hook of their own, which was there first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.utils.weight_norm(nn.Linear(6, 6)) for _ in range(4))


class Backbone(Blocks):
    """Frozen features, computed without a graph, below blocks that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).requires_grad_(False)
        self.embed.requires_grad_(False)

    def through(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.features(x)
        return super().through(x)


class Reversed(Blocks):
    def through(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Alternating(Blocks):
    """Another order in every call."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks if self.calls % 2 else reversed(self.blocks):
            x = block(x)
        return x


class Dropping(Blocks):
    """Skips other blocks in every call."""

    def through(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if (index + self.calls) % 3:
                x = block(x)
        return x


class Repeated(Blocks):
    """Runs all blocks forth and back."""

    def through(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *reversed(self.blocks)):
            x = block(x)
        return x


class Skipping(Blocks):
    """Uses what every block gave again at the end."""

    def through(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return x + sum(torch.tanh(y) for y in kept)


class Side(Blocks):
    """All blocks get the same input."""

    def through(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


class Detached(Blocks):
    """The gradient ends in the middle, and begins there too."""

    def through(self, x: Tensor) -> Tensor:
        first = self.blocks[1](self.blocks[0](x))
        x = first.detach()
        for block in self.blocks[2:]:
            x = block(x)
        return x + first


class Same(Blocks):
    """Blocks return the very tensor that they were given, changed in place: an output all the same."""

    class Adding(Block):
        def forward(self, x: Tensor) -> Tensor:
            x += self.down(self.up(torch.tanh(x)))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Same.Adding() for _ in range(5))


class InPlace(Blocks):
    """Changes what blocks return in place, and a part of it."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.mul_(0.8)
            x[:, :2].mul_(0.5)
        return x


MODELS = {
    cls.__name__: cls
    for cls in (
        *(Passing, Equal, Normed, Backbone, Reversed, Alternating, Dropping, Repeated, Skipping, Side, Detached),
        *(Same, InPlace),
    )
}
STRATEGIES = {
    "zero 1": Strategy(zero=1, bucket_mb=1e-4),
    "zero 2": Strategy(zero=2, bucket_mb=1e-4),
    "zero 3": Strategy(zero=3),
    "zero 3, hold": Strategy(zero=3, accumulation="hold"),
}


def steps(model: nn.Module, batches: Any, scale: float) -> dict[str, Tensor]:
    """Four steps; `batches` gives what comes in each, a micro-batch at a time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    evaluation = torch.empty(0)
    for step in range(4):
        for x, y in batches(step):
            (F.mse_loss(model(x), y) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:  # not always: it waits for what a forward of training must wait for by itself
            model.eval()
            with torch.no_grad():
                evaluation = model(data(99, 3)[0])
            model.train()
    return {"evaluation": evaluation}


def rank_main(name: str, strategy: Strategy) -> dict[str, Tensor]:
    model = pl.parallelize(make(MODELS[name]), strategy)

    def batches(step: int) -> Any:
        x, y = (shares(part).chunk(2) for part in data(step, 16))
        return pl.accumulate(model, list(zip(x, y, strict=True)))

    result = steps(model, batches, 1 / 2)
    with pl.full_parameters(model):
        result |= snapshot(model)
    pl.release(model)
    return result


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize(("name", "strategy"), diagonal(MODELS.keys(), STRATEGIES))
def test_training_equals_one_process(ranks: RankPool, name: str, strategy: Strategy) -> None:
    model = make(MODELS[name])

    def batches(step: int) -> Any:
        x, y = data(step, 16)
        for rank in range(2):
            model.calls = 2 * step  # type: ignore[assignment]  # every rank counts its own
            yield from zip(x[rank::2].chunk(2), y[rank::2].chunk(2), strict=True)

    expected = steps(model, batches, 1 / 4) | snapshot(model)
    for result in ranks(2, rank_main, name, strategy):
        assert_same(result, expected)
