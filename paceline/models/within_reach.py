"""The modules that a block may run beside its own: what it is given, or what its attributes refer to."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

_PLAIN = frozenset((int, float, bool, str, bytes, type(None), Tensor, nn.Parameter))
_DEPTH = 3
"""Depth to which collections and functions are searched."""


def modules_in(value: Any, depth: int = _DEPTH) -> Iterator[nn.Module]:
    """The modules that a value is or holds: in collections, functions' closures, bound methods and partial calls."""
    kind = type(value)
    if kind in _PLAIN or depth < 0:
        return
    if isinstance(value, nn.Module):
        yield value
        return
    held: Iterable[Any] = ()
    if isinstance(value, dict):
        held = value.values()
    elif isinstance(value, (list, tuple, set)):
        held = value
    elif kind is types.MethodType:
        held = (value.__self__,)
    elif kind is types.FunctionType:
        held = (*_contents(value.__closure__ or ()), *(value.__defaults__ or ()))
    elif kind is functools.partial:
        held = (value.func, *value.args, *value.keywords.values())
    for each in held:
        yield from modules_in(each, depth - 1)


def _contents(cells: Iterable[types.CellType]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:
            # Not filled yet, as of a function that is still being defined.
            continue
