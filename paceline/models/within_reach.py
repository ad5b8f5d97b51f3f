"""What a block may run and draw from beside its own modules: what it is given, or what its attributes refer to."""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.models.plain_values import SCALARS

PLAIN = SCALARS | {Tensor, nn.Parameter}
"""Classes of what most modules hold, which holds nothing itself."""
_DEPTH = 3
"""Depth to which collections and functions are searched."""


def reached(value: Any, depth: int = _DEPTH) -> Iterator[nn.Module | torch.Generator]:
    """The modules and generators that a value is or holds: in collections, dataclasses, closures, partial calls."""
    kind = type(value)
    if kind in PLAIN or depth < 0:
        return
    if isinstance(value, (nn.Module, torch.Generator)):
        yield value
        return
    held: Iterable[Any] = ()
    if isinstance(value, dict):
        held = value.values()
    elif isinstance(value, (list, tuple, set)):
        held = value
    elif dataclasses.is_dataclass(value) or kind is types.SimpleNamespace:
        held = getattr(value, "__dict__", {}).values()
    elif kind is weakref.ref:
        held = (value(),)
    elif kind is types.MethodType:
        held = (value.__self__,)
    elif kind is types.FunctionType:
        held = (*_contents(value.__closure__ or ()), *(value.__defaults__ or ()))
    elif kind is functools.partial:
        held = (value.func, *value.args, *value.keywords.values())
    for each in held:
        yield from reached(each, depth - 1)


def _contents(cells: Iterable[types.CellType]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:
            # Not filled yet, as of a function that is still being defined.
            continue
