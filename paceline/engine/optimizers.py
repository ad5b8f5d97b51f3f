"""Tells an engine when an optimizer that holds its parameters steps."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle


class Watcher(Protocol):
    """What is told."""

    def holds_parameter(self, identity: int) -> bool:
        """Whether the parameter with this `id()` is the watcher's."""
        ...

    def update_begins(self) -> None:
        """An optimizer is about to step."""
        ...

    def update_ends(self) -> None:
        """An optimizer has stepped."""
        ...


def watch_optimizers(watcher: Watcher) -> list[RemovableHandle]:
    """Hooks every torch optimizer, present or future, that holds one of the watcher's parameters.

    Users make their optimizers as ever; nothing is wrapped. The hooks end with the watcher, or by their handles.
    """
    reference = weakref.ref(watcher)

    def mine(optimizer: Optimizer) -> Watcher | None:
        alive = reference()
        if alive is None:
            return None
        held = any(alive.holds_parameter(id(p)) for group in optimizer.param_groups for p in group["params"])
        return alive if held else None

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (alive := mine(optimizer)) is not None:
            alive.update_begins()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (alive := mine(optimizer)) is not None:
            alive.update_ends()

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    for handle in handles:
        weakref.finalize(watcher, handle.remove)
    return handles
