"""A call as `__torch_function__` sees it: the function's name, and the tensors that it is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

Kind = TypeVar("Kind", bound=Tensor)


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function, or that of the attribute that is read, written or deleted."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def tensors_of(values: Any, kind: type[Kind]) -> Iterator[Kind]:
    """The tensors of some class among values, in lists and tuples too."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value, kind)


def writes(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
    return name.endswith("_")
