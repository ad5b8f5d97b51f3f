"""Whether a model is still made of the parameters that were laid out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.core.errors import EngineError
from paceline.core.layout import Layout
from paceline.models.units import named_parameters
from paceline.tensors.assigned_gradient import ReducedGradParameter

_HERE = frozenset((nn.Parameter, ReducedGradParameter))
"""Classes of parameters whose values are there."""


class Structure:
    """The modules and parameters of a model as they were when it was made parallel."""

    def __init__(self, module: nn.Module, layout: Layout, parameters: Sequence[nn.Parameter]) -> None:
        """Remembers them.

        Args:
            module: The model.
            layout: Where its parameters lie.
            parameters: In the order of `layout.slots`.
        """
        self._shapes = [(p, slot.spec.shape, slot.spec.name) for p, slot in zip(parameters, layout.slots, strict=True)]
        self._identities = {id(parameter) for parameter in parameters}
        self._registered = [
            (registry, name, member, _joined(path, name))
            for path, submodule in module.named_modules()
            for registry in (submodule._parameters, submodule._modules)
            for name, member in registry.items()
        ]
        self._members = [
            (registry, set(registry.keys()), path)
            for path, m in module.named_modules()
            for registry in (m._parameters, m._modules)
        ]
        self._frozen = [
            (slot.spec.name, p) for p, slot in zip(parameters, layout.slots, strict=True) if not slot.spec.trainable
        ]

    def holds(self, identity: int) -> bool:
        """Whether a parameter with this `id()` is the model's."""
        return identity in self._identities

    def require_unchanged(self) -> None:
        """Refuses to go on with parameters that are not those which were laid out.

        Raises:
            EngineError: A module or parameter was replaced or added, or a parameter unfrozen or given another shape,
                since.
        """
        for parameter, shape, name in self._shapes:
            # What is sharded has a shape that only the engine sets.
            if type(parameter) in _HERE and parameter.shape != shape:
                raise EngineError(
                    f"{name} changed its shape from {tuple(shape)} to {tuple(parameter.shape)} "
                    "after pl.parallelize: call pl.release(model), change it, and pl.parallelize(model) again"
                )
        for registry, name, member, path in self._registered:
            if registry.get(name) is not member:
                raise EngineError(
                    f"{path} was replaced in the model after pl.parallelize, so its gradients would not be reduced: "
                    "call pl.release(model) and pl.parallelize(model) again (load weights without assign=True)"
                )
        for registry, known, path in self._members:
            if len(registry) <= len(known):
                continue
            for name in registry.keys() - known:
                if _trains(registry[name]):
                    raise EngineError(
                        f"{_joined(path, name)} was added to the model after pl.parallelize, so its gradients would "
                        "not be reduced: call pl.release(model) and pl.parallelize(model) again"
                    )
        unfrozen = next((name for name, parameter in self._frozen if parameter.requires_grad), None)
        if unfrozen is not None:
            raise EngineError(
                f"{unfrozen} was unfrozen after pl.parallelize, so its gradients would not be reduced: call "
                "pl.release(model) and pl.parallelize(model) again"
            )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _trains(member: nn.Module | nn.Parameter | None) -> bool:
    """Whether gradients may come to a part of a model."""
    parameters = [p for _, p in named_parameters(member)] if isinstance(member, nn.Module) else [member]
    return any(parameter is not None and parameter.requires_grad for parameter in parameters)
