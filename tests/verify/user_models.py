"""Models to verify: right ones, and ones with mistakes that people make."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLES = 12
WIDTH = 6


def rank() -> int:
    return int(os.environ["RANK"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """With what layouts stumble over: a tied head, a scalar, a frozen parameter, one that is never used."""

    def __init__(self, block: Callable[[int], nn.Module] = lambda index: Block()) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, WIDTH)
        self.blocks = nn.ModuleList(block(index) for index in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 19, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 19, (SAMPLES, 5), generator=generator) for _ in range(2))  # type: ignore[return-value]


def cross_entropy(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def build() -> nn.Module:
    return Net()


class Pictures(nn.Module):
    """Its weights do not lie in memory in the order of their dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 3))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


def pictures() -> nn.Module:
    return Pictures()


images = [torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(step)) for step in range(3)]


# ---- mistakes in models


def other_weights() -> nn.Module:
    """Gives a parallel job other weights than one process."""
    net = build()
    with torch.no_grad():
        net.get_parameter("norm.bias").fill_(float(os.environ["WORLD_SIZE"]))
    return net


def in_second_block(block: type[nn.Module]) -> nn.Module:
    return Net(lambda index: block() if index == 1 else Block())


class UsesRank(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.01 * rank())


def uses_rank() -> nn.Module:
    return in_second_block(UsesRank)


class KeepsPlainTensor(Block):
    """Each process draws its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.rand(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.mask


def keeps_plain_tensor() -> nn.Module:
    return in_second_block(KeepsPlainTensor)


class KeepsAlias(Block):
    """A tensor of the parameter's memory, which the parameter would leave if it moved into a flat buffer."""

    def _apply(self, *args: Any, **named: Any) -> nn.Module:
        result = super()._apply(*args, **named)
        self.alias = self.inner.weight.data
        return result

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.alias)


def keeps_alias() -> nn.Module:
    return in_second_block(KeepsAlias)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 0.01 * rank())


class BackwardUsesRank(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + WrongBackward.apply(self.outer(torch.tanh(self.inner(x))))


def backward_uses_rank() -> nn.Module:
    return in_second_block(BackwardUsesRank)


class RunningMean(Block):
    """Takes off a mean over all samples so far, of which each rank sees its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        return y


def running_mean() -> nn.Module:
    return in_second_block(RunningMean)


class ReadsNeighbour(Net):
    """Uses a block's parameter outside of that block's forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + F.linear(self.embed(tokens), self.blocks[0].inner.weight).mean()


def reads_neighbour() -> nn.Module:
    return ReadsNeighbour()


def loss_of_rank(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(logits, batch) * (1 + 0.01 * rank())


def no_number(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(logits, batch) * float("nan")


def never_ends() -> nn.Module:
    """Stops in the second forward of the last rank of a parallel job."""
    if os.environ["WORLD_SIZE"] == "1":
        return Net()
    return in_second_block(Hangs)


class Hangs(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        while self.calls == 2 and rank() == int(os.environ["WORLD_SIZE"]) - 1:
            pass
        return super().forward(x)


# ---- what cannot be equal


def dropout() -> nn.Module:
    return in_second_block(lambda: nn.Sequential(Block(), nn.Dropout(0.1)))  # type: ignore[arg-type]


class FunctionalDropout(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


def functional_dropout() -> nn.Module:
    return in_second_block(FunctionalDropout)


class Normalised(Block):
    def __init__(self) -> None:
        super().__init__()
        self.normalise = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.normalise(x))


def batch_norm() -> nn.Module:
    return in_second_block(Normalised)


class Float32Only(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.eye(WIDTH, dtype=torch.float32)


def float32_only() -> nn.Module:
    return in_second_block(Float32Only)


def not_repeatable() -> nn.Module:
    net = build()
    with torch.no_grad():
        net.get_parameter("blocks.0.inner.bias").copy_(
            torch.frombuffer(bytearray(os.urandom(WIDTH)), dtype=torch.uint8)
        )
    return net


def not_a_module() -> Any:
    return Net
