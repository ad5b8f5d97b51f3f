"""What a block may run and draw from beside its own modules: what it is given, or what its attributes refer to."""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from paceline.models.drawn_from import is_drawn_from
from paceline.models.plain_values import SCALARS, attributes_of

PLAIN = SCALARS | {Tensor, nn.Parameter}
"""Classes of what most modules hold, which holds nothing itself."""
_METHODS = frozenset((types.MethodType, types.BuiltinMethodType, types.MethodWrapperType))
_DEPTH = 3
"""Depth to which collections and functions are searched."""


def reached(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The modules, random generators and iterators that a value is or holds.

    In collections, dataclasses, closures and partial calls; those that are drawn from also in objects of other classes.
    """
    kind = type(value)
    if kind in PLAIN:
        return
    if isinstance(value, nn.Module) or is_drawn_from(value):
        yield value
        return
    if depth == 0:
        return
    held: Iterable[Any] = ()
    if isinstance(value, dict):
        held = value.values()
    elif isinstance(value, (list, tuple, set)):
        held = value
    elif dataclasses.is_dataclass(kind) or kind is types.SimpleNamespace:
        held = attributes_of(value).values()
    elif kind is weakref.ref:
        held = (value(),)
    elif kind in _METHODS or kind.__name__ == "cython_function_or_method":
        held = (value.__self__,)
    elif kind is types.FunctionType:
        held = (*_contents(value.__closure__ or ()), *(value.__defaults__ or ()))
    elif kind is functools.partial:
        held = (value.func, *value.args, *value.keywords.values())
    elif getattr(kind, "__new__", None) is object.__new__ and not isinstance(value, (type, types.ModuleType)):
        # Not the modules: a block that refers to what trains it does not run all of that.
        held = (each for each in attributes_of(value).values() if is_drawn_from(each))
    for each in held:
        yield from reached(each, depth - 1)


def _contents(cells: Iterable[types.CellType]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:
            # Not filled yet, as of a function that is still being defined.
            continue
