"""Tells an engine when an optimizer that holds its parameters steps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.engine.parameters import Parameters

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

OF_ALL = frozenset({"step", "mu_product", "eta", "mu"})
"""States of torch's optimizers that are one number for all elements of a parameter."""

SHARD = "paceline_shard"
"""Key of a parameter group: which shard of its parameters the states are of, and of how many."""


def elementwise(optimizer: type[Optimizer]) -> type[Optimizer]:
    """Vouches that an optimizer class updates each element from that element's gradient and state alone.

    Usable as a decorator. Only such optimizers may update sharded parameters.
    """
    ELEMENTWISE.add(optimizer)
    return optimizer


def prepare_optimizer(optimizer: Optimizer, parameters: Parameters, strategy: Strategy) -> None:
    """Makes an optimizer step on shards: cuts states that it holds for whole parameters, which some make when built.

    Raises:
        UserError: The optimizer would compute something else from a shard than from the whole.
    """
    own, shards = parameters.flat.number
    if isinstance(optimizer, torch.optim.LBFGS) and parameters.flat.has_masters:
        raise UserError("LBFGS keeps gradients of all parameters in one vector: set strategy.precision to float32")
    if shards > 1:
        _require_elementwise(optimizer, strategy)
        require_states_of(optimizer, own, shards)
        for group in optimizer.param_groups:
            # It is saved and loaded with the states, which look alike on all ranks.
            group[SHARD] = [own, shards]
    managed = set(parameters.flat.managed)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        index = parameters.flat.index_of.get(id(parameter))
        states = optimizer.state.get(parameter)
        if index in managed and states:
            _cut_states(type(optimizer).__name__, states, parameters, index)


def require_states_of(optimizer: Optimizer, own: int = 0, shards: int = 1) -> None:
    """Refuses states of other shards than those that an optimizer is about to update.

    Args:
        optimizer: Any.
        own: Which of `shards` it updates of each parameter.
        shards: Into how many parameters are cut; 1 if they are whole.

    Raises:
        UserError: It holds states of another shard.
    """
    if not optimizer.state:
        return
    for group in optimizer.param_groups:
        theirs, of = group.get(SHARD, (own, shards))
        if (theirs, of) != (own, shards):
            updates = f"this rank updates shard {own} of {shards}" if shards > 1 else "parameters are whole now"
            raise UserError(
                f"{type(optimizer).__name__} holds states of shard {theirs} of {of}, but {updates}: load on each rank "
                "what that rank saved, with the same strategy and number of ranks, or the states of one process; or "
                "make a new optimizer"
            )


def _require_elementwise(optimizer: Optimizer, strategy: Strategy) -> None:
    if type(optimizer) not in ELEMENTWISE:
        raise UserError(
            f"{type(optimizer).__name__} may need whole parameters or norms across them, but with "
            f"zero={strategy.zero} each rank updates its own shards: set strategy.zero to 0, or use one of torch's "
            "elementwise optimizers (AdamW, SGD, ...); vouch for one of your own with pl.elementwise(YourOptimizer)"
        )


def _cut_states(optimizer: str, states: dict[str, Any], parameters: Parameters, index: int) -> None:
    """Makes what an optimizer holds for one parameter go with this rank's shard of it, in the dtype of its update."""
    local, spec = parameters.flat.local.get(index), parameters.flat.layout.slots[index].spec
    assert local is not None
    for name, state in states.items():
        if not isinstance(state, Tensor) or (not state.dim() and name in OF_ALL):
            continue
        if tuple(state.shape) == spec.shape:
            if state.shape != local.shape or state.dtype != local.dtype:
                states[name] = parameters.flat.cut(index, state)
        elif state.shape != local.shape and state.dim():
            raise UserError(
                f"{optimizer} holds {name} of shape {list(state.shape)} for {spec.name}, of which "
                f"this rank updates {local.numel()} elements: load states that were saved with the same strategy "
                "and number of ranks, or those of one process"
            )


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


_watchers: list[weakref.ref[Watcher]] = []
"""In the order in which models were made parallel, the same on every rank: what they do before a step they do in it."""


def watch_optimizers(watcher: Watcher) -> None:
    """Watches every torch optimizer, present or future, that holds one of the watcher's parameters.

    Users make their optimizers as ever; nothing is wrapped. It ends with the watcher, or by `leave_optimizers`.
    """
    _hook_optimizers()
    _watchers.append(weakref.ref(watcher, _watchers.remove))


def leave_optimizers(watcher: Watcher) -> None:
    """Ends watching."""
    _watchers[:] = [reference for reference in _watchers if reference() is not watcher]


@cache
def _hook_optimizers() -> None:
    # Once for all: torch goes through its hooks while a watcher may be collected, which must not take one out.
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    watching = _watching(optimizer, sys._getframe(1))
    if not watching and not any(_holds(watcher, optimizer) for watcher in _alive()):
        require_states_of(optimizer)
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
    for watcher in _watching(optimizer, sys._getframe(1)):
        watcher.update_ends()


def _watching(optimizer: Optimizer, step: FrameType) -> list[Watcher]:
    """The watchers of an optimizer's parameters, but for those that are in a step already, of which this one is a part.

    Args:
        optimizer: Is about to step, or has stepped.
        step: Torch's frame around its `step`, which calls the hooks.
    """
    watching = [watcher for watcher in _alive() if _holds(watcher, optimizer)]
    outer = list(_steps_around(step)) if watching else []
    return [watcher for watcher in watching if not any(_holds(watcher, other) for other in outer)]


def _alive() -> list[Watcher]:
    return [watcher for reference in tuple(_watchers) if (watcher := reference()) is not None]


def _holds(watcher: Watcher, optimizer: Optimizer) -> bool:
    return any(watcher.holds_parameter(id(p)) for group in optimizer.param_groups for p in group["params"])


def _steps_around(step: FrameType) -> Iterator[Optimizer]:
    """Optimizers in whose step this one is, such as the one that calls `super().step()`.

    They are read off the stack: no hook of torch's tells of a step that raised, so that counting would go wrong.
    """
    frame = step.f_back
    while frame is not None:
        if frame.f_code is step.f_code:
            yield frame.f_locals["self"]
        frame = frame.f_back
