"""What a training loop is written against, so that the very same one runs in one process, under DDP and under paceline.

Losses and other values of one rank are given as functions of the rank's number. `Plain` calls them for every rank, one
after another, on one model; the others only for their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl

Weights = list[dict[str, Tensor]]
Note = tuple[str, list[Tensor | None]]
"""A name, and a value for each rank; None where this process does not know it."""


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's weights and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Job:
    """What is common: the models in the order in which they came, and what the loop has noted.

    Attributes:
        ranks: How many there are.
        models: What `parallel` was called with.
        notes: What the loop has seen, by rank.
        changes: How often the loop has changed weights.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.models: list[nn.Module] = []
        self.notes: list[Note] = []
        self.changes = 0
        self.mine: range | list[int] = range(ranks)

    def parallel(self, model: nn.Module) -> Any:
        """Makes a model parallel; returns what is to be called in its place."""
        self.models.append(model)
        return model

    def loss(self, of_rank: Callable[[int], Tensor]) -> Tensor:
        """What to call backward on."""
        (rank,) = self.mine
        return of_rank(rank)

    def note(self, name: str, of_rank: Callable[[int], Tensor]) -> None:
        """Keeps a value of each rank."""
        values: list[Tensor | None] = [None] * self.ranks
        for rank in self.mine:
            values[rank] = of_rank(rank).detach().clone()
        self.notes.append((name, values))

    def changed(self) -> None:
        """The loop has just changed weights."""
        self.changes += 1

    def micro_batches(self, nets: list[Any], numbers: tuple[int, ...], way: str) -> Iterator[int]:
        """The numbers of a rank's micro-batches in one step, of which `numbers` says each rank's."""
        (rank,) = self.mine
        for index in range(numbers[rank]):
            with ExitStack() as stack:
                if way != "backwards" and index < numbers[rank] - 1:
                    for net in nets:
                        stack.enter_context(net.no_sync())
                yield index

    def clip(self, model: nn.Module, largest: float) -> Tensor:
        """Clips the gradient norm; returns what it was."""
        return torch.nn.utils.clip_grad_norm_(model.parameters(), largest)

    def recover(self) -> None:
        """After an exception that all ranks raised in forward or backward."""
        for model in self.models:
            model.zero_grad()

    def copied(self, model: nn.Module) -> nn.Module:
        """A plain copy of a model."""
        return copy.deepcopy(model)


class Plain(Job):
    """One process that plays all ranks; keeps the weights after every change, the first of all included."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.states: list[Weights] = []

    def parallel(self, model: nn.Module) -> Any:
        super().parallel(model)
        # A model may come after others were trained; until then what it has is no rank's business.
        self.states = [*self.states[:-1], self.weights()] if self.states else [self.weights()]
        return model

    def weights(self) -> Weights:
        return [state_of(model) for model in self.models]

    def loss(self, of_rank: Callable[[int], Tensor]) -> Tensor:
        return torch.stack([of_rank(rank) for rank in self.mine]).sum() / self.ranks

    def changed(self) -> None:
        super().changed()
        self.states.append(self.weights())

    def micro_batches(self, nets: list[Any], numbers: tuple[int, ...], way: str) -> Iterator[int]:
        try:
            for index in range(max(numbers)):
                self.mine = [rank for rank in range(self.ranks) if index < numbers[rank]]
                yield index
        finally:
            self.mine = range(self.ranks)


class Parallel(Job):
    """One rank under paceline."""

    def __init__(self, ranks: int, rank: int, strategy: pl.Strategy) -> None:
        super().__init__(ranks)
        self.mine, self.strategy = [rank], strategy

    def parallel(self, model: nn.Module) -> Any:
        return super().parallel(pl.parallelize(model, self.strategy))

    def micro_batches(self, nets: list[Any], numbers: tuple[int, ...], way: str) -> Iterator[int]:
        (rank,) = self.mine
        if way in ("accumulate", "uneven") and len(nets) == 1:
            return pl.accumulate(nets[0], range(numbers[rank]), uneven=way == "uneven")
        return super().micro_batches(nets, numbers, way)

    def clip(self, model: nn.Module, largest: float) -> Tensor:
        return pl.clip_grad_norm_(model, largest)

    def recover(self) -> None:
        # A rank that resets ends what others wait in, and all are to fail by themselves.
        pl.barrier()
        for model in self.models:
            pl.reset(model)


class Ddp(Job):
    """One rank under torch's DDP, to see which programs are right there."""

    def __init__(self, ranks: int, rank: int, find_unused: bool) -> None:
        super().__init__(ranks)
        self.mine, self.find_unused = [rank], find_unused

    def parallel(self, model: nn.Module) -> Any:
        super().parallel(model)
        if not any(p.requires_grad for p in model.parameters()):
            return model
        return DistributedDataParallel(model, find_unused_parameters=self.find_unused)

    def recover(self) -> None:
        dist.barrier()
        super().recover()
