"""Tells an engine when an optimizer that holds its parameters steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.engine.weights import Weights
from paceline.errors import UserError
from paceline.strategy import Strategy

ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
"""Optimizers whose update of an element depends on that element alone, so that a shard can be updated by itself."""

PIECE = "paceline_piece"
"""Key of a parameter group: which piece of its parameters the states are of, and of how many."""


def elementwise(optimizer: type[Optimizer]) -> type[Optimizer]:
    """Vouches that an optimizer class updates each element from that element's gradient and state alone.

    Usable as a decorator. Only such optimizers may update sharded parameters.
    """
    ELEMENTWISE.add(optimizer)
    return optimizer


def prepare_optimizer(optimizer: Optimizer, weights: Weights, strategy: Strategy) -> None:
    """Makes an optimizer step on pieces: cuts states that it holds for whole parameters, which some make when built.

    Raises:
        UserError: The optimizer would compute something else from a piece than from the whole.
    """
    if type(optimizer) not in ELEMENTWISE:
        raise UserError(
            f"{type(optimizer).__name__} may need whole parameters or norms across them, but with "
            f"zero={strategy.zero} each rank updates its own pieces: set strategy.zero to 0, or use one of torch's "
            "elementwise optimizers (AdamW, SGD, ...); vouch for one of your own with pl.elementwise(YourOptimizer)"
        )
    for group in optimizer.param_groups:
        # It is saved and loaded with the states, which look alike on all ranks.
        (theirs, of), (own, shards) = group.get(PIECE, weights.number), weights.number
        if optimizer.state and (theirs, of) != (own, shards):
            raise UserError(
                f"{type(optimizer).__name__} holds states of piece {theirs} of {of}, but this rank updates piece {own} "
                f"of {shards}: load on each rank what that rank saved, with the same strategy and number of ranks, or "
                "the states of one process"
            )
        group[PIECE] = [own, shards]
    indices = {id(weights.parameters[index]): index for index in weights.swapped}
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) in indices):
        index = indices[id(parameter)]
        piece, spec = weights.piece(index), weights.layout.slots[index].spec
        assert piece is not None
        states = optimizer.state.get(parameter, {})
        for name, state in states.items():
            if not isinstance(state, Tensor) or not state.dim() or state.shape == piece.shape:
                continue
            if tuple(state.shape) != spec.shape:
                raise UserError(
                    f"{type(optimizer).__name__} holds {name} of shape {list(state.shape)} for {spec.name}, of which "
                    f"this rank updates {piece.numel()} elements: load states that were saved with the same strategy "
                    "and number of ranks, or those of one process"
                )
            states[name] = weights.cut(index, state)


class Watcher(Protocol):
    """What is told."""

    def holds_parameter(self, identity: int) -> bool:
        """Whether the parameter with this `id()` is the watcher's."""
        ...

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        ...

    def update_ends(self) -> None:
        """An optimizer has stepped."""
        ...

    def mean_loss(self, loss: float | Tensor) -> Tensor:
        """The mean over ranks of a loss."""
        ...


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


def watch_optimizers(watcher: Watcher) -> None:
    """Watches every torch optimizer, present or future, that holds one of the watcher's parameters.

    Users make their optimizers as ever; nothing is wrapped. It ends with the watcher, or by `leave_optimizers`.
    """
    _hook_optimizers()
    _watchers.add(watcher)


def leave_optimizers(watcher: Watcher) -> None:
    """Ends watching."""
    _watchers.discard(watcher)


@cache
def _hook_optimizers() -> None:
    # Once for all: torch goes through its hooks while a watcher may be collected, which must not take one out.
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    watching = _watching(optimizer)
    for watcher in watching:
        watcher.update_begins(optimizer)
    if not watching or not isinstance(optimizer, torch.optim.LBFGS):
        return None

    # It decides by the loss how far to go and when to stop, which all ranks must do alike.
    def everyones(closure: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: watching[0].mean_loss(closure())

    *before, last = args
    if "closure" in kwargs:
        return args, {**kwargs, "closure": everyones(kwargs["closure"])}
    return (*before, everyones(last)), kwargs


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in _watching(optimizer):
        watcher.update_ends()


def _watching(optimizer: Optimizer) -> list[Watcher]:
    identities = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return [watcher for watcher in _watchers if any(map(watcher.holds_parameter, identities))]
