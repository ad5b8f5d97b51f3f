"""A view of a parameter, with a graph, whose memory that parameter has left: computing with it is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from paceline.core.errors import EngineError
from paceline.tensors.calls import name_of, tensors_of
from paceline.tensors.former_gradient import DESCRIPTIONS

K = TypeVar("K")


class StaleView(Tensor):
    """Such as `module.tied = module.weight.t()`, taken before the parameter was given the memory that it has now.

    Under DDP it would follow the parameter for good, and gradients would go through it.
    """

    _name: str
    _taken: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuses what depends on the values."""
        kwargs = kwargs or {}
        stale = next(tensors_of((*args, *kwargs.values()), StaleView))
        name = name_of(func)
        if name in ("__repr__", "__format__"):
            return f"view of {stale._name} as it was {stale._taken}"
        if name not in DESCRIPTIONS:
            raise EngineError(
                f"{stale._name}: a view of it that was taken {stale._taken}, with a graph, is in other memory than the "
                "parameter now: what it computes, or its gradient, would be wrong. Take the view in forward, anew each "
                "time, or keep p.detach().clone() of what is only read"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def views_of(parameters: Mapping[K, nn.Parameter]) -> Iterator[tuple[K, Tensor]]:
    """Yields each view of some parameters that has a graph, wherever Python holds it, with its parameter's key.

    Goes through all objects of this process: some hundredths of a second.
    """
    keys = {id(parameter): key for key, parameter in parameters.items()}
    with torch._C.DisableTorchFunctionSubclass():
        for each in gc.get_objects():
            if type(each) is Tensor and each.requires_grad and each._is_view() and id(each._base) in keys:
                yield keys[id(each._base)], each


def become_stale(view: Tensor, name: str, taken: str) -> None:
    """Marks a view, which stays the same object.

    Args:
        view: What `views_of` gave.
        name: Of its parameter.
        taken: When the view was taken, in words.
    """
    stale = cast(StaleView, view)
    stale.__class__ = StaleView
    stale._name, stale._taken = name, taken
