"""What a unit's parts are given and return that hooks of others see, and may keep, as for a loss of features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils.hooks import RemovableHandle

from paceline.hooks.modules import ModuleHook, in_backward
from paceline.hooks.outputs import tensors_in
from paceline.hooks.units_under_way import UnitsUnderWay
from paceline.tensors.untraced import untraced


class HookedTensors:
    """Notes what hooks of others see inside a unit: gradients may come to it that come to no output, or before."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module], under_way: UnitsUnderWay) -> None:
        """Of a model's units, by name; `under_way` tells inside which of them a part runs."""
        self._parts = {name: list(unit.modules())[1:] for name, unit in units.items()}
        inside = {id(part) for parts in self._parts.values() for part in parts}
        self._around = [module for module in model.modules() if module is not model and id(module) not in inside]
        self._under_way = under_way
        self._noted: dict[int, tuple[RemovableHandle, ...]] = {}
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
        of_all = bool(_global_forward_hooks or _global_forward_pre_hooks)
        for module in modules:
            before, after = module._forward_pre_hooks, module._forward_hooks
            if not (before or after or of_all) or id(module) in self._noted:
                continue
            if of_all or not all(isinstance(hook, ModuleHook) for hook in (*before.values(), *after.values())):
                note = ModuleHook(untraced(self._note))
                # First and last, as hooks may put other outputs in the place of those that others have kept.
                self._noted[id(module)] = (
                    module.register_forward_pre_hook(note, with_kwargs=True),
                    module.register_forward_hook(note, with_kwargs=True, prepend=True),
                    module.register_forward_hook(note, with_kwargs=True),
                )

    def _note(self, module: nn.Module, *seen: Any) -> None:
        # The hooks of a unit that runs in no other come after `take`.
        if self._noted:
            self._found += (tensor for tensor in tensors_in(seen) if tensor.grad_fn is not None)

    def take(self, unit: str) -> list[Tensor]:
        """What was noted in the forward of a unit, which has ended."""
        if not self._noted or unit != self._under_way.outermost:
            return []
        found = self._found
        self.remove()
        return found

    def remove(self) -> None:
        """Leaves modules as they are without it."""
        for handles in self._noted.values():
            for handle in handles:
                handle.remove()
        self._noted, self._found = {}, []
