"""Copies of plain values that a forward may change: collections, arrays, and the attributes of objects."""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

SCALARS = frozenset((int, float, complex, bool, str, bytes, type(None)))
"""Classes of what holds nothing and never changes."""
MAPPINGS = frozenset((dict, OrderedDict, defaultdict, Counter))
SEQUENCES = frozenset((list, deque))
"""Classes of what holds values in places, which can be replaced."""
_COLLECTIONS = MAPPINGS | SEQUENCES | {tuple, set}
SMALL = 65_536
"""Elements of an array or tensor whose copy costs nothing worth telling: all that statistics of norms are."""
_DEPTH = 2
"""Objects inside each other whose attributes are copied."""
_NOT_OWN = sys.stdlib_module_names | {"torch", "numpy"}
"""Packages whose objects are left alone: they have states of other kinds, or none."""
_OF_THREADS = frozenset(
    {
        *("_thread", "threading", "queue", "_queue", "multiprocessing", "concurrent", "asyncio", "_asyncio"),
        *("socket", "_socket", "_io", "subprocess", "selectors"),
    }
)
"""Packages of what another thread may work with, together with the object that holds it."""


class Copies:
    """Copies of some values at one time; what lies in several places is one."""

    def __init__(self) -> None:
        """Has copied nothing yet."""
        self._copied: dict[int, tuple[Any, Any]] = {}
        """By `id()`, a value, which stays alive so, and its copy."""
        self._objects: list[tuple[Any, dict[str, Any]]] = []
        """Objects, and copies of their attributes."""
        self._inside = 0
        """Objects around what is being copied."""

    def of(self, value: Any) -> Any:
        """A copy that shares nothing with a value that can change; the value itself where it is none that is copied.

        An object of a user's own is not copied, but its attributes: see `put`.
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
        elif kind in _COLLECTIONS and not (self._inside and len(value) > SMALL):
            found = copy.copy(value)
            self._copied[id(value)] = value, found
            for place in places_of(value):
                if (other := self.of(value[place])) is not value[place]:
                    found[place] = other
        elif self._inside < _DEPTH and _is_own(value):
            self._copied[id(value)] = value, value
            self._inside += 1
            self._objects.append((value, {name: self._member(each) for name, each in attributes_of(value).items()}))
            self._inside -= 1
        else:
            return value
        self._copied[id(value)] = value, found
        return found

    def _member(self, value: Any) -> Any:
        """A copy of an object's attribute, also of a tensor."""
        if not is_small(value) or value.requires_grad:
            return self.of(value)
        if id(value) not in self._copied:
            self._copied[id(value)] = value, value.clone()
        return self._copied[id(value)][1]

    def put(self) -> Callable[[], None]:
        """Gives objects the attributes that they had, or copies of these; returns what undoes that."""
        fresh = Copies()
        were = [(value, attributes_of(value)) for value, _ in self._objects]
        for value, before in self._objects:
            set_attributes(value, {name: fresh._member(each) for name, each in before.items()})

        def undo() -> None:
            for value, was in were:
                set_attributes(value, was)

        return undo


def is_small(value: Any) -> bool:
    """Whether it is a tensor whose copy costs nothing, and keeps no graph alive, as one of an auxiliary loss would."""
    return type(value) is Tensor and value.numel() <= SMALL and value.grad_fn is None and not value.is_inference()


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


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object by name, also those in slots."""
    kind: Any = type(value)
    slots = {name: getattr(value, name) for name in _slots_of(kind) if hasattr(value, name)}
    return slots | getattr(value, "__dict__", {})


def set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Gives an object these attributes, and no others."""
    kind: Any = type(value)
    slots = _slots_of(kind)
    if hasattr(value, "__dict__"):
        replace(vars(value), {name: each for name, each in attributes.items() if name not in slots})
    for name in slots:
        # Not by its own `__setattr__`, which a frozen dataclass refuses.
        if name in attributes:
            object.__setattr__(value, name, attributes[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    found = []
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_mangled = name.startswith("__") and not name.endswith("__")
            found.append(f"_{each.__name__.lstrip('_')}{name}" if is_mangled else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _is_own(value: Any) -> bool:
    """Whether it is an object of a user's own class that no other thread is known to change: a counter, a meter."""
    kind: Any = type(value)
    if kind is not SimpleNamespace and (
        kind.__new__ is not object.__new__ or kind.__module__.partition(".")[0] in _NOT_OWN
    ):
        return False
    if isinstance(value, (nn.Module, Optimizer)) or not (_slots_of(kind) or hasattr(value, "__dict__")):
        return False
    held = (str(type(each).__module__).partition(".")[0] for each in attributes_of(value).values())
    return _OF_THREADS.isdisjoint(held)
