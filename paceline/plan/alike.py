"""Which of a model's blocks compute the same, so that one trace stands for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

_PLAIN = (int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)


class Alike:
    """Tells blocks apart by all that their results' shapes can depend on.

    Two modules are alike if, submodule by submodule, they are of one class, have parameters and buffers of the same
    names, shapes and dtypes, none of which other parts of the model use, and otherwise hold equal plain values or the
    very same objects. What a block knows of its own place, such as Hugging Face's `layer_idx`, is left out; whether it
    matters `place_told` tells.

    So much is known of modules of torch, transformers and paceline alone: a forward of anybody else may count calls, or
    ask a global what to do.
    """

    def __init__(self, model: nn.Module) -> None:
        """Looks at who shares what in `model`."""
        self._uses = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
        self._uses.update(id(each) for _, each in model.named_buffers(remove_duplicate=False))

    def module(self, name: str, module: nn.Module) -> Hashable:
        """Equal for modules that are alike.

        Args:
            name: The module's, as in `named_modules`; its last part may be its place among its like.
            module: The block.
        """
        if not all(map(_is_known, module.modules())):
            return name
        place = _place(name)
        return tuple((path, self._own(part, place)) for path, part in module.named_modules())

    def _own(self, part: nn.Module, place: int | None) -> Hashable:
        tensors = [
            (name, each is None or self._tensor(each))
            for held in (part._parameters, part._buffers)
            for name, each in held.items()
        ]
        skipped = {"_parameters", "_buffers", "_modules"}
        others = [
            (name, "its place" if _is_place(name, value, place) else _value(value))
            for name, value in part.__dict__.items()
            if name not in skipped
        ]
        return type(part), tuple(tensors), tuple(others)

    def _tensor(self, tensor: Tensor) -> Hashable:
        alone = self._uses[id(tensor)] <= 1
        return *_described(tensor), isinstance(tensor, nn.Parameter), alone or id(tensor)


def _is_known(part: nn.Module) -> bool:
    """Whether a module computes by what it holds and is given alone."""
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    return type(part).__module__.partition(".")[0] in ("torch", "transformers", "paceline") and not any(hooks)


def _place(name: str) -> int | None:
    last = name.rpartition(".")[2]
    return int(last) if last.isdigit() else None


def _is_place(key: str, value: Any, place: int | None) -> bool:
    """Whether an attribute is a block's own number among its like."""
    return type(value) is int and value == place and "idx" in key


@contextmanager
def place_told(name: str, module: nn.Module, asked: Callable[[], None]) -> Iterator[None]:
    """Tells when a block asks for its own number among its like, by which it may compute something else.

    Args:
        name: The block's.
        module: The block, whose parts are of other classes meanwhile.
        asked: Is called then.
    """
    place, was = _place(name), []
    try:
        for part in module.modules():
            if places := [key for key, value in part.__dict__.items() if _is_place(key, value, place)]:
                was.append((part, type(part)))
                part.__class__ = type(type(part).__name__, (type(part),), {key: _told(key, asked) for key in places})
        yield
    finally:
        for part, kind in was:
            part.__class__ = kind


def _told(key: str, asked: Callable[[], None]) -> property:
    def read(part: nn.Module) -> Any:
        asked()
        return part.__dict__[key]

    return property(read)


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Equal for calls that are alike: tensors by shape, strides, dtype and need of a gradient, others by value.

    Where gradients are not recorded, or autocast is on, a call is another one.
    """
    leaves, spec = tree_flatten((args, dict(kwargs)))
    modes = (
        torch.is_grad_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )
    return modes, str(spec), tuple(_described(each) if isinstance(each, Tensor) else _value(each) for each in leaves)


def _described(tensor: Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad


def _value(value: Any) -> Hashable:
    if type(value) in _PLAIN:
        return type(value).__name__, value
    if type(value) in (tuple, list):
        return type(value).__name__, tuple(map(_value, value))
    if isinstance(value, dict):
        return type(value).__name__, tuple((_value(key), _value(each)) for key, each in value.items())
    if isinstance(value, (set, frozenset)) and not value:
        return type(value).__name__
    return id(value)
