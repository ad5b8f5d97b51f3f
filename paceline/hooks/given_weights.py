"""Weights that a loop has put in the place of a model's own, computed with in the precision of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.hooks.modules import ModuleHook


class GivenWeights:
    """Rounds fp32 weights that are not a module's own while it computes, and puts them back.

    Such as averaged ones of `torch.func.functional_call`, or a frozen part that took another's place.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, applies: Callable[[], bool]) -> None:
        """Takes the weights that a module has now for its own.

        Args:
            module: Computes in low precision.
            dtype: What it computes in.
            applies: Whether it does so now.
        """
        self._module, self._dtype, self._applies = module, dtype, applies
        self._known = [
            (registry, name, member)
            for part in module.modules()
            for registry in (part._parameters, part._modules)
            for name, member in registry.items()
        ]
        self._own = {id(member) for _, _, member in self._known}
        self._given: list[list[tuple[dict[str, Any], str, Tensor]]] = []

    def begin(self, *_: Any) -> None:
        """The module is about to compute."""
        given: list[tuple[dict[str, Any], str, Tensor]] = []
        self._given.append(given)
        if torch.compiler.is_compiling() or not self._applies():
            return
        if all(registry.get(name) is member for registry, name, member in self._known):
            return
        for part in self._module.modules():
            for name, weight in part._parameters.items():
                if weight is not None and id(weight) not in self._own and weight.dtype == torch.float32:
                    given.append((part._parameters, name, weight))
        for registry, name, own in given:
            registry[name] = own.to(self._dtype)

    def end(self, *_: Any) -> None:
        """It has computed, or raised."""
        for registry, name, weight in self._given.pop() if self._given else ():
            registry[name] = weight


def round_given_weights(
    modules: Iterable[nn.Module], dtype: torch.dtype, applies: Callable[[], bool]
) -> list[RemovableHandle]:
    """Registers hooks that have modules compute with rounded copies of weights that are not their own."""
    handles = []
    for module in modules:
        given = GivenWeights(module, dtype, applies)
        handles.append(module.register_forward_pre_hook(ModuleHook(given.begin)))
        handles.append(module.register_forward_hook(ModuleHook(given.end), always_call=True))
    return handles
