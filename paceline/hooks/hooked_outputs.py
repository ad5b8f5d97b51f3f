"""Outputs of a unit's parts that forward hooks of others are given, and may keep for a loss, as of features do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.hooks.modules import ModuleHook
from paceline.hooks.outputs import tensors_in
from paceline.hooks.units_under_way import UnitsUnderWay
from paceline.tensors.untraced import untraced


class HookedOutputs:
    """Notes them, as gradients may come to them that come to no output of the unit, or before."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module], under_way: UnitsUnderWay) -> None:
        """Of a model's units, by name; `under_way` tells inside which of them a part runs."""
        self._parts = {name: list(unit.modules())[1:] for name, unit in units.items()}
        inside = {id(part) for parts in self._parts.values() for part in parts}
        self._around = [module for module in model.modules() if module is not model and id(module) not in inside]
        self._under_way = under_way
        self._noted: dict[int, RemovableHandle] = {}
        self._found: dict[str, list[Tensor]] = {}

    def begin(self, unit: str) -> None:
        """A unit's forward begins."""
        self._follow(self._parts[unit])
        if unit == self._under_way.outermost:
            self._found.pop(unit, None)
        else:
            # It runs inside another one, and so may what it is a part of.
            self._follow(self._around)

    def _follow(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            hooks = module._forward_hooks
            if hooks and id(module) not in self._noted and not all(isinstance(h, ModuleHook) for h in hooks.values()):
                self._noted[id(module)] = module.register_forward_hook(ModuleHook(untraced(self._note)))

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        outermost = self._under_way.outermost
        if outermost is not None:
            found = self._found.setdefault(outermost, [])
            found += (tensor for tensor in tensors_in(output) if tensor.grad_fn is not None)

    def take(self, unit: str) -> list[Tensor]:
        """What was noted in the forward of a unit, which has ended."""
        return self._found.pop(unit, []) if unit == self._under_way.outermost else []

    def remove(self) -> None:
        """Notes nothing from now on."""
        for handle in self._noted.values():
            handle.remove()
