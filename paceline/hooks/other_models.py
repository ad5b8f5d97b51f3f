"""Parameters of a model that another parallel model has, too: they are that one's, whose engine sees to them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from paceline.core.errors import EngineError, UserError
from paceline.models.units import named_parameters
from paceline.tensors.sharded_parameter import Owner, owner_of


class OtherModels:
    """The parallel models that have had some of a model's parameters before it.

    Attributes:
        names: Of these parameters.
        owners: Their engines, which live as long as this one does.
    """

    def __init__(self, model: nn.Module, is_sharded: bool) -> None:
        """Looks for them.

        Args:
            model: Not parallel itself yet.
            is_sharded: Whether ranks are to have shards of its own parameters.

        Raises:
            UserError: What another model has is not computed with as it is, or it has all.
        """
        found = [(name, parameter, owner_of(parameter)) for name, parameter in named_parameters(model)]
        self._left = {id(parameter): (name, parameter, owner) for name, parameter, owner in found if owner is not None}
        self.names = [name for name, _, _ in self._left.values()]
        self.owners: tuple[Owner, ...] = tuple({id(owner): owner for _, _, owner in self._left.values()}.values())
        for name, _, owner in self._left.values():
            if is_sharded or owner.schedule.shards_parameters or len(self._left) == len(found):
                raise UserError(
                    f"parallelize: {name} belongs to another parallel model already: parallelize the outermost model "
                    "alone, or one that has both, or call pl.release on the other. Up to zero 2 one that has "
                    "parameters of its own besides leaves those to the other"
                )

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter is another model's."""
        return id(parameter) in self._left

    def of(self, owner: Owner) -> list[nn.Parameter]:
        """Those that are one engine's."""
        return [parameter for _, parameter, whose in self._left.values() if whose is owner]

    def leave(self, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Those of some modules that are not other models' with all their parameters."""
        return {name: module for name, module in modules.items() if not self._have_all_of(module)}

    def _have_all_of(self, module: nn.Module) -> bool:
        found = [parameter in self for _, parameter in named_parameters(module)]
        return bool(found) and all(found)

    def require_parallel(self) -> None:
        """Refuses to go on with parameters whose gradients nobody reduces any more.

        Raises:
            EngineError: Another model was released.
        """
        for name, parameter, owner in self._left.values():
            if owner_of(parameter) is not owner:
                raise EngineError(
                    f"{name} belonged to another parallel model, which was released since, so its gradients would not "
                    "be reduced: call pl.release(model) on this one, too, and pl.parallelize(model) again"
                )
