"""Which of a model's blocks compute the same, so that one trace stands for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
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
    matters shows when the last of them is traced, too.
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
        last = name.rpartition(".")[2]
        place = int(last) if last.isdigit() else None
        return tuple((path, self._own(part, place)) for path, part in module.named_modules())

    def _own(self, part: nn.Module, place: int | None) -> Hashable:
        tensors = [
            (name, each is None or self._tensor(each))
            for held in (part._parameters, part._buffers)
            for name, each in held.items()
        ]
        skipped = {"_parameters", "_buffers", "_modules"}
        others = [
            (name, "its place" if type(value) is int and value == place and "idx" in name else _value(value))
            for name, value in part.__dict__.items()
            if name not in skipped
        ]
        return type(part), tuple(tensors), tuple(others)

    def _tensor(self, tensor: Tensor) -> Hashable:
        alone = self._uses[id(tensor)] <= 1
        return *_described(tensor), isinstance(tensor, nn.Parameter), alone or id(tensor)


def knows_its_place(name: str, module: nn.Module) -> bool:
    """Whether a block holds its own number among its like, by which it may compute something else."""
    last = name.rpartition(".")[2]
    return last.isdigit() and any(
        type(value) is int and value == int(last) and "idx" in attribute
        for part in module.modules()
        for attribute, value in part.__dict__.items()
    )


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Equal for calls that are alike: tensors by shape, strides, dtype and need of a gradient, others by value."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    return str(spec), tuple(_described(each) if isinstance(each, Tensor) else _value(each) for each in leaves)


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
