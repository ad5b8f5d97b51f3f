"""Tells an engine when an optimizer that holds its parameters steps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache, wraps
from itertools import islice
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from paceline.core.errors import EngineError
from paceline.optimizers.elementwise import SHARD
from paceline.optimizers.shard_states import require_states_of
from paceline.tensors.untraced import untraced


class Watcher(Protocol):
    """What is told."""

    def holds_parameter(self, identity: int) -> bool:
        """Whether the parameter with this `id()` is the watcher's."""
        ...

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        ...

    def part_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step inside the step of another one, of which the watcher was told."""
        ...

    def update_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        ...

    def closure_begins(self, optimizer: Optimizer) -> None:
        """The closure of the step is about to run."""
        ...

    def closure_ends(self, optimizer: Optimizer) -> None:
        """A closure of this optimizer has run."""
        ...

    def mean_loss(self, loss: float | Tensor) -> Tensor:
        """The mean over ranks of a loss."""
        ...


_watchers: list[weakref.ref[Watcher]] = []
"""In the order in which models were made parallel, the same on every rank: what they do before a step they do in it.

Those that are gone stay in until another comes. A reference that took itself out when its watcher is collected would do
that while others go through the list, and Python 3.11, which collects when it makes a tuple of one, would crash.
"""


def watch_optimizers(watcher: Watcher) -> None:
    """Watches every torch optimizer, present or future, that holds one of the watcher's parameters.

    Users make their optimizers as ever; nothing is wrapped. It ends with the watcher, or by `leave_optimizers`.
    """
    _hook_optimizers()
    _watchers[:] = [*(reference for reference in _watchers if reference() is not None), weakref.ref(watcher)]


def leave_optimizers(watcher: Watcher) -> None:
    """Ends watching."""
    _watchers[:] = [reference for reference in _watchers if reference() is not watcher]


@cache
def _hook_optimizers() -> None:
    # Once for all, as torch goes through its hooks while a watcher may be collected.
    register_optimizer_step_pre_hook(untraced(_hook_innermost))


_OWN = -1
"""Key of this module's hooks among an optimizer's own, which torch counts from 0."""


def _hook_innermost(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer is about to step: has the watchers told after its hooks before a step, and before those after it.

    So what a loop does in these (clips weights, averages or logs them) finds parameters as they are between steps, and
    not the shards that the optimizer itself is shown.
    """
    watching = [watcher for watcher in alive() if _holds(watcher, optimizer)]
    # Those of the watchers' own are looked at by them; others are whole.
    require_states_of(optimizer, lambda own: not any(watcher.holds_parameter(own) for watcher in watching))
    if watching:
        _require_no_hooks_inside(optimizer)
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        before[_OWN], after[_OWN] = _UNTRACED
        before.move_to_end(_OWN)  # type: ignore[attr-defined]
        after.move_to_end(_OWN, last=False)  # type: ignore[attr-defined]


def _require_no_hooks_inside(optimizer: Optimizer) -> None:
    """Refuses hooks of an optimizer that steps inside another's step, or its own: they would find shards.

    Raises:
        EngineError: It has some.
    """
    if not {*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks} - {_OWN}:
        return
    for outer in _steps_around():
        if any(group.get(SHARD, (0, 1))[1] > 1 for group in outer.param_groups):
            raise EngineError(
                f"{type(outer).__name__}.step() calls {type(optimizer).__name__}'s, whose hooks before or after a step "
                "would find this rank's shards of the parameters, others on each rank: do their work before or after "
                "optimizer.step(), or set strategy.zero to 0"
            )


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    watching = _watching(optimizer)
    for watcher in watching:
        watcher.update_begins(optimizer)
    for watcher in alive():
        if watcher not in watching and _holds(watcher, optimizer):
            watcher.part_begins(optimizer)
    if not watching:
        return None

    def watched(closure: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(closure)
        def run(*given: Any, **named: Any) -> Any:
            for watcher in watching:
                watcher.closure_begins(optimizer)
            loss = closure(*given, **named)
            for watcher in watching:
                watcher.closure_ends(optimizer)
            # LBFGS decides by the loss how far to go and when to stop, which all ranks must do alike.
            return watching[0].mean_loss(loss) if isinstance(optimizer, torch.optim.LBFGS) else loss

        return run

    itself, *others = args
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": watched(kwargs["closure"])}
    return ((itself, watched(others[0]), *others[1:]), kwargs) if others and callable(others[0]) else None


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in _watching(optimizer):
        watcher.update_ends(optimizer)


_UNTRACED = untraced(_before), untraced(_after)
"""What torch.compile of `optimizer.step` does not look into."""


def _watching(optimizer: Optimizer) -> list[Watcher]:
    """The watchers of an optimizer's parameters, but for those that are in a step already, of which this one is a part.

    Args:
        optimizer: Is about to step, or has stepped.
    """
    watching = [watcher for watcher in alive() if _holds(watcher, optimizer)]
    outer = list(_steps_around()) if watching else []
    return [watcher for watcher in watching if not any(_holds(watcher, other) for other in outer)]


def alive() -> list[Watcher]:
    """Returns all watchers, in the order in which they began."""
    return [watcher for reference in _watchers if (watcher := reference()) is not None]


def _holds(watcher: Watcher, optimizer: Optimizer) -> bool:
    return any(watcher.holds_parameter(id(p)) for group in optimizer.param_groups for p in group["params"])


_TORCHS = Optimizer.profile_hook_step.__code__.co_filename


def begins_with_closure(optimizer: Optimizer) -> bool:
    """Whether a closure runs once in a step and before all else, as in all steps of torch's but LBFGS's."""
    step = type(optimizer).step
    return step.__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def is_stepping() -> bool:
    """Whether this thread is in an optimizer's step."""
    return any(True for _ in _steps())


def _steps_around() -> Iterator[Optimizer]:
    """Optimizers in whose step the one is that a hook is called for, such as the one that calls `super().step()`."""
    return islice(_steps(), 1, None)


def _steps() -> Iterator[Optimizer]:
    """The optimizers that are in a step, the innermost first.

    They are read off the stack: no hook of torch's tells of a step that raised, so that counting would go wrong.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # Torch's frame around a `step`, which calls the hooks; what torch.compile makes of it has that in its name.
        if code.co_filename == _TORCHS and "wrapper" in code.co_name:
            yield frame.f_locals["self"]
        frame = frame.f_back
