"""Copies of plain values that a forward may change: collections, arrays, and what simple objects are made of."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

SCALARS = frozenset((int, float, complex, bool, str, bytes, type(None)))
"""Classes of what holds nothing and never changes."""
MAPPINGS = frozenset((dict, OrderedDict, defaultdict, Counter))
SEQUENCES = frozenset((list, deque))
"""Classes of what holds values in places, which can be replaced."""
_COLLECTIONS = MAPPINGS | SEQUENCES | {tuple, set}
_MADE_OF = SCALARS | _COLLECTIONS | {np.ndarray}
SMALL = 65_536
"""Elements of an array or tensor whose copy costs nothing worth telling: all that statistics of norms are."""


class Copies:
    """Copies of some values at one time; what lies in several places is one."""

    def __init__(self) -> None:
        """Has copied nothing yet."""
        self._copied: dict[int, tuple[Any, Any]] = {}
        """By `id()`, a value, which stays alive so, and its copy."""
        self._objects: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The attributes of objects, and their copies."""

    def of(self, value: Any) -> Any:
        """A copy that shares nothing with a value that can change; the value itself where it is none that is copied.

        An object of a user's own is not copied, but its attributes, if they all are plain: see `put`.
        """
        kind = type(value)
        if kind in SCALARS:
            return value
        if id(value) in self._copied:
            return self._copied[id(value)][1]
        found = value
        if kind is np.ndarray:
            found = value.copy() if value.size <= SMALL and value.dtype != object else value
        elif kind is tuple:
            members = tuple(self.of(each) for each in value)
            found = members if any(a is not b for a, b in zip(members, value, strict=True)) else value
        elif kind in _COLLECTIONS:
            found = copy.copy(value)
            self._copied[id(value)] = value, found
            for place in places_of(value):
                if (other := self.of(value[place])) is not value[place]:
                    found[place] = other
        elif _is_plain(value):
            self._copied[id(value)] = value, value
            self._objects.append((value.__dict__, {name: self.of(each) for name, each in value.__dict__.items()}))
        else:
            return value
        self._copied[id(value)] = value, found
        return found

    def put(self) -> Callable[[], None]:
        """Gives objects the attributes that they had, or copies of these; returns what undoes that."""
        fresh = Copies()
        were = [(attributes, dict(attributes)) for attributes, _ in self._objects]
        for attributes, before in self._objects:
            replace(attributes, {name: fresh.of(each) for name, each in before.items()})

        def undo() -> None:
            for attributes, was in were:
                replace(attributes, was)

        return undo


def places_of(value: Any) -> Iterable[Any]:
    """The places of a mapping or sequence that hold its values; none of anything else."""
    return value if type(value) in MAPPINGS else range(len(value)) if type(value) in SEQUENCES else ()


def replace(members: dict[Any, Any], others: Mapping[Any, Any]) -> None:
    """Puts others in the place of all that a dictionary holds, which stays the same one."""
    others = dict(others)
    members.clear()
    members.update(others)


def is_alike(now: Any, before: Any) -> bool:
    """Whether a value is as its copy was."""
    kind = type(now)
    if now is before or kind is not type(before):
        return now is before
    if kind in SCALARS or kind is set:
        return bool(now == before)
    if kind in MAPPINGS:
        return now.keys() == before.keys() and all(is_alike(now[key], value) for key, value in before.items())
    if kind in SEQUENCES or kind is tuple:
        return len(now) == len(before) and all(is_alike(a, b) for a, b in zip(now, before, strict=True))
    return kind is np.ndarray and np.array_equal(now, before)


def _is_plain(value: Any) -> bool:
    """Whether it is an object that is made of scalars, collections and arrays alone: a counter, a meter."""
    new: Any = type(value).__new__
    if isinstance(value, nn.Module) or not (new is object.__new__ or type(value) is SimpleNamespace):
        return False
    attributes = getattr(value, "__dict__", None)
    return type(attributes) is dict and all(type(each) in _MADE_OF for each in attributes.values())
