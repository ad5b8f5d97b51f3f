"""The pieces that random models are put together from: each maps (batch, length, WIDTH) to as much.

A block says in `use` how a model calls it and what it makes of the answer; that code runs outside of the block's own
forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Block(nn.Module):
    """A normalised linear layer beside its input, between the two perhaps a module that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.given: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for module in self.given:
            y = module(y)
        return x + torch.tanh(self.linear(y))

    def use(self, x: Tensor, later: list[Tensor]) -> Tensor:
        """What a model computes with this block; `later` takes what it multiplies by after all blocks."""
        return self(x)


class Mlp(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 7, bias=False), nn.GELU(), nn.Linear(7, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.inner(x)


class Attention(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + torch.tanh(self.linear(self.attention(y, y, y, need_weights=False)[0]))


class InList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([nn.Parameter(torch.linspace(0.5, 1.5, WIDTH) + i) for i in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = x * gain
        return super().forward(torch.tanh(x))


class InDict(Block):
    def __init__(self) -> None:
        super().__init__()
        self.affine = nn.ParameterDict({"scale": torch.ones(WIDTH) * 0.7, "shift": torch.linspace(0, 1, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.affine["scale"] + self.affine["shift"])


class Odd(Block):
    """With parameters that are scalar, empty and of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.9))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.single = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scalar + self.single + self.empty.sum())


class Strided(Block):
    """With a parameter of many dimensions that is laid out in another order than theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Parameter(torch.linspace(-1, 1, 6 * WIDTH).reshape(3, 1, 2, WIDTH).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.spread.tanh().mean((0, 1, 2)))


class Buffered(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.linspace(0.5, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.slope)


class Tied(Block):
    """Two layers inside with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sin(self.other(x)))


class Experts(Block):
    """Keeps an auxiliary loss as an attribute, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        self.aux = share.mean((0, 1)).square().sum() + self.gate.weight.square().sum()
        mixed = sum(share[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return super().forward(x + mixed)


class Direct(Block):
    """Is not called: its model calls `forward`."""

    def use(self, x: Tensor, later: list[Tensor]) -> Tensor:
        return self.forward(x)


class ByMethod(Block):
    """Is not called: its model calls another method of it."""

    def project(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.linear.weight + self.linear.bias)

    def use(self, x: Tensor, later: list[Tensor]) -> Tensor:
        return self.project(self(x))


class GivesDict(Block):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": super().forward(x), "gain": self.linear.bias}

    def use(self, x: Tensor, later: list[Tensor]) -> Tensor:
        answer = self(x)
        return answer["hidden"] * (1 + answer["gain"])


@dataclass
class Answer:
    hidden: Tensor


class GivesDataclass(Block):
    def forward(self, x: Tensor) -> Answer:
        return Answer(super().forward(x))

    def use(self, x: Tensor, later: list[Tensor]) -> Tensor:
        return self(x).hidden


class Held:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class GivesObject(Block):
    def forward(self, x: Tensor) -> Held:
        return Held(super().forward(x))

    def use(self, x: Tensor, later: list[Tensor]) -> Tensor:
        return self(x).hidden


class GivesGenerator(Block):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield super().forward(x)
        yield torch.tanh(self.linear(x))

    def use(self, x: Tensor, later: list[Tensor]) -> Tensor:
        return sum(self(x), torch.zeros_like(x))


class FillsList(Block):
    def forward(self, x: Tensor, into: list[Tensor]) -> None:
        into.append(super().forward(x))

    def use(self, x: Tensor, later: list[Tensor]) -> Tensor:
        into: list[Tensor] = []
        self(x, into)
        return into[0]


class GivesView(Block):
    """Returns a view of its parameter, which is read after all other blocks ran."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.gate.expand(x.shape[0], 1, WIDTH)

    def use(self, x: Tensor, later: list[Tensor]) -> Tensor:
        x, view = self(x)
        later.append(view)
        return x


class Checkpointed(Block):
    """Computes its inside again in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


class CalledInCheckpoint(Block):
    """Is called inside a checkpoint of its model's."""

    reentrant = False

    def use(self, x: Tensor, later: list[Tensor]) -> Tensor:
        return checkpoint(self, x, use_reentrant=self.reentrant)


class CalledInReentrantCheckpoint(CalledInCheckpoint):
    reentrant = True


class Convolved(Block):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.convolution(x.transpose(1, 2)).transpose(1, 2))


KINDS: dict[str, type[Block]] = {
    "linear": Block,
    "mlp": Mlp,
    "attention": Attention,
    "parameter list": InList,
    "parameter dict": InDict,
    "odd shapes": Odd,
    "strides": Strided,
    "buffer": Buffered,
    "tied inside": Tied,
    "convolution": Convolved,
    "experts": Experts,
    "forward called": Direct,
    "method called": ByMethod,
    "gives dict": GivesDict,
    "gives dataclass": GivesDataclass,
    "gives object": GivesObject,
    "gives generator": GivesGenerator,
    "fills list": FillsList,
    "gives view": GivesView,
    "checkpoint inside": Checkpointed,
    "reentrant checkpoint inside": CheckpointedReentrantly,
    "in a checkpoint": CalledInCheckpoint,
    "in a reentrant checkpoint": CalledInReentrantCheckpoint,
}
CHAINABLE = tuple(kind for kind, cls in KINDS.items() if cls.use is Block.use)
"""Blocks that take a tensor and give one, so that `nn.Sequential` can call them."""
