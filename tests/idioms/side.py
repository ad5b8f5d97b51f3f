"""What an idiom is written against: the same lines train in one process, under DDP and under paceline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl

Found = dict[str, Tensor]
"""What an idiom ends with, by name: weights, and what it has noted."""

WIDTH = 8


class Side:
    """One process that has the whole batch.

    Attributes:
        dtype: Of models and data.
        micro: How many micro-batches a step has.
        ranks: How many ranks share a batch.
        rank: Which of them this is.
        unused: Whether DDP must look for parameters that got no gradient.
    """

    def __init__(self, dtype: torch.dtype, micro: int, unused: bool = False) -> None:
        self.dtype, self.micro, self.unused = dtype, micro, unused
        self.ranks, self.rank = 1, 0

    def parallel(self, model: nn.Module) -> Any:
        """What is called in a model's place."""
        return model

    def rows(self, batch: Tensor) -> Tensor:
        """The rows of a batch that are trained on here."""
        return batch

    def tensor(self, *shape: int, seed: int = 0) -> Tensor:
        """The same normal numbers everywhere, in the dtype of the side."""
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

    def batch(self, step: int, count: int = 8) -> tuple[Tensor, Tensor]:
        """Rows of `WIDTH` inputs and two targets."""
        return self.rows(self.tensor(count, WIDTH, seed=2 * step)), self.rows(self.tensor(count, 2, seed=2 * step + 1))

    def micro_batches(self, net: Any, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A step's micro-batches, to be divided by `micro`."""
        for index in range(self.micro):
            with self.no_sync(net) if index < self.micro - 1 else nullcontext():
                yield self.batch(10 * step + index)

    def no_sync(self, net: Any) -> AbstractContextManager[Any]:
        """As of DDP."""
        return nullcontext()

    def whole(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Where parameters may be read and edited."""
        return nullcontext()

    def release(self, model: nn.Module) -> None:
        """The model becomes a plain one."""

    def mean(self, value: Tensor) -> Tensor:
        """The mean over ranks."""
        return value.detach().double()

    def gather(self, features: Tensor) -> Tensor:
        """All ranks' rows, as contrastive losses gather them: a rank's own with their graph."""
        return features

    def clip(self, model: nn.Module, largest: float, parameters: Iterable[nn.Parameter] | None = None) -> Tensor:
        """Clips the norm of gradients: of all, or of some parameters."""
        return torch.nn.utils.clip_grad_norm_(model.parameters() if parameters is None else parameters, largest)

    def scaler(self, **options: Any) -> Any:
        """A scaler of losses."""
        return torch.amp.GradScaler("cpu", **options)


class Ddp(Side):
    """A rank of DDP."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()

    def parallel(self, model: nn.Module) -> Any:
        return DistributedDataParallel(model, find_unused_parameters=self.unused)

    def rows(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.ranks)[self.rank]

    def no_sync(self, net: Any) -> AbstractContextManager[Any]:
        return net.no_sync()  # type: ignore[no-any-return]

    def mean(self, value: Tensor) -> Tensor:
        total = value.detach().double().clone()
        dist.all_reduce(total)
        return total / self.ranks

    def gather(self, features: Tensor) -> Tensor:
        every = [torch.empty_like(features) for _ in range(self.ranks)]
        dist.all_gather(every, features.detach().contiguous())
        every[self.rank] = features
        return torch.cat(every)


class Paceline(Ddp):
    """A rank of paceline."""

    def __init__(self, dtype: torch.dtype, micro: int, strategy: pl.Strategy) -> None:
        super().__init__(dtype, micro)
        self.strategy = strategy
        self.models: list[nn.Module] = []

    def parallel(self, model: nn.Module) -> Any:
        self.models.append(model)
        return pl.parallelize(model, self.strategy)

    def whole(self, model: nn.Module) -> AbstractContextManager[Any]:
        return pl.full_parameters(model)

    def release(self, model: nn.Module) -> None:
        self.models.remove(pl.release(model))

    def clip(self, model: nn.Module, largest: float, parameters: Iterable[nn.Parameter] | None = None) -> Tensor:
        return pl.clip_grad_norm_(model, largest, parameters)

    def scaler(self, **options: Any) -> Any:
        return pl.GradScaler(**options)


@dataclass(frozen=True)
class Idiom:
    """A few lines that users write.

    Attributes:
        run: Gives what they end with.
        against: What a rank is held against: one process with the whole batch ("one"), or the same rank of DDP where
            the result depends on how a batch is shared out ("ddp"), such as through BatchNorm.
        refused: Where paceline may refuse it, such as "zero 3", and words of what it says.
        unused: Whether some parameters get no gradient in a step.
        low: Whether it is run in low precision, too.
        off: How far low precision may be off at zero 0.
    """

    run: Callable[[Side], Found]
    against: str = "one"
    refused: tuple[tuple[str, str], ...] = ()
    unused: bool = False
    low: bool = True
    off: float = 0.05

    def refusal(self, places: Collection[str]) -> str | None:
        """What is said where it may be refused, of a strategy that goes by these names."""
        return next((words for place, words in self.refused if place in places), None)


IDIOMS: dict[str, Idiom] = {}
"""By name."""


def idiom(**options: Any) -> Callable[[Callable[[Side], Found]], Callable[[Side], Found]]:
    """Registers a function as an idiom under its name."""

    def register(run: Callable[[Side], Found]) -> Callable[[Side], Found]:
        IDIOMS[run.__name__.replace("_", " ")] = Idiom(run, **options)
        return run

    return register


def state(model: nn.Module, prefix: str = "") -> Found:
    """A model's weights and buffers, copied."""
    return {prefix + name: value.detach().double().clone() for name, value in model.state_dict().items()}


def mlp(side: Side, *, seed: int = 0, inputs: int = WIDTH, outputs: int = 2, blocks: int = 2) -> nn.Sequential:
    """A small model of several units."""
    torch.manual_seed(seed)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(inputs, WIDTH), *middle, nn.Linear(WIDTH, outputs)).to(side.dtype)


class Stack(nn.Module):
    """Blocks one after another, and a head."""

    def __init__(self, block: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(block() for _ in range(count)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Loss = Callable[[Tensor, Tensor], Tensor]
"""Of a batch's inputs and targets."""


def fit(side: Side, net: Any, optimizer: torch.optim.Optimizer, steps: int = 3, loss_of: Loss | None = None) -> None:
    """The ordinary loop; of the mean square by default."""
    loss_of = loss_of or (lambda x, y: (net(x) - y).square().mean())
    for step in range(steps):
        for x, y in side.micro_batches(net, step):
            loss_of(x, y).div(side.micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def descend(side: Side, optimizer: torch.optim.Optimizer, loss_of: Loss, steps: int = 3) -> None:
    """The ordinary loop without accumulation: a batch in each step."""
    for step in range(steps):
        loss_of(*side.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(side: Side, model: nn.Module, lr: float = 0.1, steps: int = 3) -> Found:
    model = model.to(side.dtype)
    net = side.parallel(model)
    fit(side, net, torch.optim.SGD(model.parameters(), lr), steps)
    return evaluated(side, net, model)


def evaluated(side: Side, net: Any, model: nn.Module) -> Found:
    """Weights, buffers and losses in evaluation, before which DDP sends rank 0's buffers to all."""
    model.eval()
    with torch.no_grad():
        x, y = side.batch(99)
        answer = net(x)
        loss = side.mean(((answer[0] if isinstance(answer, tuple) else answer) - y).square().mean())
    return {**state(model), "loss": loss}
