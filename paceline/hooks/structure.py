"""Whether a model is still made of the parameters that were laid out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.core.errors import EngineError
from paceline.core.layout import Layout
from paceline.hooks.other_models import OtherModels
from paceline.models.units import named_parameters
from paceline.tensors.assigned_gradient import ReducedGradParameter

_HERE = frozenset((nn.Parameter, ReducedGradParameter))
"""Classes of parameters whose values are there."""


class Structure:
    """The modules and parameters of a model as they were when it was made parallel."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        parts_stay: bool,
        others: OtherModels,
    ) -> None:
        """Remembers them.

        Args:
            module: The model.
            layout: Where its parameters lie.
            parameters: In the order of `layout.slots`.
            parts_stay: Whether each part must stay in its place, as the parameters of one are gathered for it there.
            others: Have parameters of it that were not laid out.
        """
        self._module, self._parts_stay, self._others = module, parts_stay, others
        self._specs = [(p, slot.spec) for p, slot in zip(parameters, layout.slots, strict=True)]
        self._identities = {id(parameter) for parameter in parameters}
        self._in_buckets = {id(parameters[index]) for bucket in layout.buckets for index in bucket.slots}
        self._frozen = [
            (slot.spec.name, p) for p, slot in zip(parameters, layout.slots, strict=True) if not slot.spec.trainable
        ]
        self._remember()

    def _remember(self) -> None:
        """Where each part is now."""
        module = self._module
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

    def holds(self, identity: int, in_bucket: bool = False) -> bool:
        """Whether a parameter with this `id()` is the model's, or in a bucket of it: trained or sharded."""
        return identity in (self._in_buckets if in_bucket else self._identities)

    def require_unchanged(self) -> None:
        """Refuses to go on with parameters that are not those which were laid out.

        Raises:
            EngineError: A module or parameter was replaced or added, or a parameter unfrozen or given another shape,
                since; or another model that has some was released.
        """
        self._others.require_parallel()
        for parameter, spec in self._specs:
            # What is sharded has a shape that only the engine sets.
            if type(parameter) in _HERE and parameter.shape != spec.shape:
                spec.require_shape(parameter.shape)
        for registry, name, member, path in self._registered:
            if registry.get(name) is not member:
                self._look_again(path)
                break
        self.require_nothing_added()
        unfrozen = next((name for name, parameter in self._frozen if parameter.requires_grad), None)
        if unfrozen is not None:
            raise EngineError(
                f"{unfrozen} was unfrozen after pl.parallelize, so its gradients would not be reduced: call "
                "pl.release(model), pl.parallelize(model) again, and make a new optimizer. What is to be trained later "
                "may be frozen after pl.parallelize instead of before: then it can be unfrozen at any time"
            )

    def require_nothing_added(self) -> None:
        """Refuses parameters that have come to others since; within a forward others may be lent in their places.

        Raises:
            EngineError: There are such.
        """
        for registry, known, path in self._members:
            if len(registry) <= len(known):
                continue
            for name in registry.keys() - known:
                if self._trains(registry[name]):
                    raise EngineError(
                        f"{_joined(path, name)} was added to the model after pl.parallelize, so its gradients would "
                        "not be reduced: call pl.release(model) and pl.parallelize(model) again"
                    )

    def _look_again(self, path: str) -> None:
        """Parts were moved, wrapped, tied, left out or put back, which is fine while nothing new is trained.

        Raises:
            EngineError: Something is, or parts must stay.
        """
        if self._parts_stay or self._trains(self._module):
            raise EngineError(
                f"{path} was replaced in the model after pl.parallelize, so its gradients would not be reduced: "
                "call pl.release(model) and pl.parallelize(model) again (load weights without assign=True)"
            )
        self._remember()

    def _trains(self, member: nn.Module | nn.Parameter | None) -> bool:
        """Whether gradients may come to parameters in a part of a model that were not laid out."""
        parameters = [p for _, p in named_parameters(member)] if isinstance(member, nn.Module) else [member]
        added = (p for p in parameters if p is not None and id(p) not in self._identities)
        return any(p.requires_grad and p not in self._others for p in added)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
