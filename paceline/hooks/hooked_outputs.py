"""Outputs of a unit's parts that forward hooks of others are given, and may keep for a loss, as of features do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.hooks.modules import ModuleHook, in_backward
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
        self._found: list[Tensor] = []

    def begin(self, unit: str) -> None:
        """A unit's forward begins."""
        if in_backward():
            # A checkpoint's, which ends it as soon as it has what it needs.
            return
        if unit == self._under_way.outermost:
            self.remove()
        else:
            # It runs inside another one, and so may what it is a part of.
            self._follow(self._around)
        self._follow(self._parts[unit])

    def _follow(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            hooks = module._forward_hooks
            if hooks and id(module) not in self._noted and not all(isinstance(h, ModuleHook) for h in hooks.values()):
                self._noted[id(module)] = module.register_forward_hook(ModuleHook(untraced(self._note)))

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        # The hooks of a unit that runs in no other come after `take`.
        if self._noted:
            self._found += (tensor for tensor in tensors_in(output) if tensor.grad_fn is not None)

    def take(self, unit: str) -> list[Tensor]:
        """What was noted in the forward of a unit, which has ended."""
        if unit != self._under_way.outermost:
            return []
        found = self._found
        self.remove()
        return found

    def remove(self) -> None:
        """Leaves modules as they are without it."""
        for handle in self._noted.values():
            handle.remove()
        self._noted, self._found = {}, []
