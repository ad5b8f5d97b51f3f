"""Inputs in the precision that a model computes in."""

from __future__ import annotations

import re
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import is_dataclass
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _Orthogonal, _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from paceline.hooks.modules import ModuleHook
from paceline.models.plain_values import MAPPINGS, SEQUENCES, attributes_of, places_of, set_attributes

_OF_DTYPES = re.compile("dtype|scalar type|should be the same")


def cast_inputs(
    model: nn.Module, units: Iterable[nn.Module], dtype: torch.dtype, applies: Callable[[], bool]
) -> list[RemovableHandle]:
    """Casts fp32 tensors that a model, its units and what fp32 buffers meet are called with to what they compute in.

    They are found in collections, in collections of these, and in dataclasses and `SimpleNamespace`.

    Buffers stay as they are: rotary frequencies lose too much otherwise. What is computed from them is cast where it
    enters a unit, or a part of one where a unit has a buffer of that kind.

    Args:
        model: Computes in low precision.
        units: Its units.
        dtype: What it computes in.
        applies: Whether it does so now.
    """
    # Of each thread, as branches of a forward may run in several.
    under_way: dict[int, list[tuple[nn.Module, list[_Copy | _CastRecord | _CastTensor]]]] = defaultdict(list)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not applies() or not any(map(_may_hold_wide, (*args, *kwargs.values()))):
            return None
        given = _Given(dtype)
        low = tuple(map(given.of, args)), {name: given.of(each) for name, each in kwargs.items()}
        if given.copies:
            under_way[get_ident()].append((module, given.copies))
        return low

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is model and output is None and applies():
            _tell_of_dtypes(sys.exception(), dtype)
        if (mine := under_way[get_ident()]) and mine[-1][0] is module:
            for each in mine.pop()[1]:
                each.write_back()

    def widen(part: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        # It inverts matrices, which has no kernels in low precision, and multiplies with a buffer.
        return tuple(each.float() for each in args) if applies() else None

    def narrow(part: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return output.to(dtype) if applies() else None

    units = list(units)
    orthogonal = [part for part in model.modules() if isinstance(part, _Orthogonal)]
    entered = dict.fromkeys((model, *units, *_beside_buffers(units)))
    enters, leaves = ModuleHook(before), ModuleHook(after)
    return [
        *(module.register_forward_pre_hook(enters, with_kwargs=True) for module in entered),
        *(module.register_forward_hook(leaves, always_call=True) for module in entered),
        *(part.register_forward_pre_hook(ModuleHook(widen)) for part in orthogonal),
        *(part.register_forward_hook(ModuleHook(narrow)) for part in orthogonal),
    ]


def cast_singular_vectors(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts what spectral normalisation multiplies weights with, its buffers, to the dtype of these.

    Args:
        model: Computes in `dtype`.
        dtype: What weights are in.
    """
    for module in model.modules():
        if isinstance(module, _SpectralNorm):
            names = ["_u", "_v"]
        else:
            hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
            names = [f"{hook.name}_{vector}" for hook in hooks for vector in "uv"]
        for name in names:
            if isinstance(buffer := getattr(module, name, None), Tensor):
                setattr(module, name, buffer.to(dtype))


class _Given:
    """What a unit is given in the place of what it is called with: the same but for casts.

    Attributes:
        copies: What was made anew for it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """In `dtype`."""
        self._dtype = dtype
        self.copies: list[_Copy | _CastRecord | _CastTensor] = []
        self._found: dict[int, Any] = {}
        """By `id()`, what is given in a value's place: the same in all of its places, and inside itself."""

    def of(self, value: Any) -> Any:
        """What is given in a value's place."""
        if id(value) in self._found:
            return self._found[id(value)]
        if isinstance(value, Tensor):
            if not _is_wide(value):
                return value
            self._found[id(value)] = cast = value.to(self._dtype)
            self.copies.append(_CastTensor(value, cast))
            return cast
        if type(value) is tuple:
            return tuple(map(self.of, value))
        # Where there is nothing to cast the unit gets the very object, which it may change.
        if type(value) in MAPPINGS or type(value) in SEQUENCES:
            self._found[id(value)] = cast = copy(value)
            places = list(places_of(value))
            for place in places:
                cast[place] = self.of(value[place])
            if all(cast[place] is value[place] for place in places):
                self._found[id(value)] = value
                return value
            self.copies.append(_Copy(value, cast))
            return cast
        if _is_record(value):
            self._found[id(value)] = cast = copy(value)
            own = attributes_of(value)
            given = {name: self.of(each) for name, each in own.items()}
            if all(given[name] is own[name] for name in own):
                self._found[id(value)] = value
                return value
            set_attributes(cast, given)
            self.copies.append(_CastRecord(value, cast))
            return cast
        if not any(map(_is_wide, tree_leaves(value))):
            # Not made anew by pytree, as the unit may change it, too.
            return value
        return tree_map(lambda each: each.to(self._dtype) if _is_wide(each) else each, value)


class _CastTensor:
    """A tensor that a unit is given in place of the caller's.

    Attributes:
        given: What the unit gets.
    """

    def __init__(self, own: Tensor, given: Tensor) -> None:
        """Takes the caller's and the unit's."""
        self._own, self.given = own, given
        self._version = None if given.is_inference() else given._version

    def write_back(self) -> None:
        """Writes to the caller's what the unit has written to the one that it got."""
        if self._version is not None and self.given._version != self._version:
            self._own.copy_(self.given)


class _CastRecord:
    """An object that a unit is given in place of the caller's, with some of its attributes cast."""

    def __init__(self, own: Any, given: Any) -> None:
        """Takes the caller's and the unit's."""
        self._own, self._given, self._before = own, given, attributes_of(given)

    def write_back(self) -> None:
        """Changes the caller's as the unit has changed the one that it got; what it left alone stays uncast."""
        own, now, before = attributes_of(self._own), attributes_of(self._given), self._before
        if now.keys() != before.keys() or any(now[name] is not before[name] for name in now):
            left = {name: own[name] for name in now if name in before and now[name] is before[name]}
            set_attributes(self._own, now | left)


class _Copy:
    """A mapping or sequence that a unit is given in place of the caller's, with some tensors in it cast.

    Attributes:
        given: What the unit gets.
    """

    def __init__(self, own: Any, given: Any) -> None:
        """Takes the caller's and the unit's, item by item the same but for casts."""
        self._own, self.given = own, given
        self._before = copy(given)

    def write_back(self) -> None:
        """Changes the caller's as the unit has changed the one that it got; what it left alone stays uncast."""
        own, given, before = self._own, self.given, self._before
        if list(places_of(given)) == list(places_of(before)) and all(given[p] is before[p] for p in places_of(given)):
            return
        if type(given) in MAPPINGS:
            left = {key: own[key] for key in given if key in before and given[key] is before[key]}
            own.clear()
            for key, value in given.items():
                own[key] = left.get(key, value)
        else:
            uncast = {id(then): value for then, value in zip(before, own, strict=True)}
            own.clear()
            own.extend([uncast.get(id(value), value) for value in given])


def _is_record(value: Any) -> bool:
    """Whether it is an object whose attributes are all that there is of it."""
    kind = type(value)
    return kind is SimpleNamespace or (
        is_dataclass(kind) and not isinstance(value, (nn.Module, dict, list, tuple)) and kind not in SUPPORTED_NODES
    )


def _tell_of_dtypes(error: BaseException | None, dtype: torch.dtype) -> None:
    """Adds to what torch says of two dtypes why there are two."""
    if isinstance(error, (RuntimeError, ValueError)) and _OF_DTYPES.search(str(error)):
        note = (
            f"The model computes in {str(dtype).removeprefix('torch.')} (strategy.precision). fp32 tensors that it and "
            "its units are called with are cast to that, also in collections, dataclasses and SimpleNamespace; those "
            "in other objects, and buffers, are not: write x.to(weight.dtype) where one meets a weight, and "
            "x.to(self.mean.dtype) where a buffer is updated"
        )
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32


def _may_hold_wide(value: Any) -> bool:
    if isinstance(value, Tensor):
        return _is_wide(value)
    return isinstance(value, (tuple, list, dict, deque)) or hasattr(value, "__dict__") or is_dataclass(value)


def _beside_buffers(units: Sequence[nn.Module]) -> Iterable[nn.Module]:
    """The parts with parameters of units which fp32 activations may enter, as fp32 buffers of a unit make them.

    Of all units, as what the one returns may enter another by a method that no hook sees, such as `block.forward(x)`.
    """
    if any(buffer.dtype == torch.float32 for unit in units for buffer in unit.buffers()):
        for part in (part for unit in units for part in unit.modules()):
            statistics = isinstance(part, nn.modules.batchnorm._NormBase)
            if not statistics and any(each is not None for each in part._parameters.values()):
                yield part
