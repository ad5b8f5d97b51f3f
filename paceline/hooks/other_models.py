"""Parameters of a model that another parallel model has, too: they are that one's, whose engine sees to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from paceline.buffers.weights_hash import weights_hash
from paceline.comm.control import all_gather_json
from paceline.core.errors import EngineError, UserError
from paceline.core.schedule import Schedule
from paceline.core.step_state import StepState
from paceline.core.strategy import Strategy
from paceline.models.units import named_parameters


class Owner(Protocol):
    """The engine of a model.

    Attributes:
        state: Which step the training loop is in.
    """

    state: StepState

    @property
    def schedule(self) -> Schedule:
        """The ops of a step."""

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every parameter of the model is whole, and may be written to."""

    def owns_parameter(self, identity: int) -> bool:
        """Whether the parameter with this `id()` is trained or sharded by it."""


E = TypeVar("E", bound=Owner)


class OtherModels(Generic[E]):
    """The parallel models that have had some of a model's parameters before it.

    Attributes:
        names: Of these parameters.
        owners: Their engines, which live as long as this one does.
    """

    def __init__(self, model: nn.Module, engines: Sequence[E], strategy: Strategy, is_sharded: bool) -> None:
        """Looks for them.

        Args:
            model: Not parallel itself yet.
            engines: Of all parallel models.
            strategy: How it is to be synchronised.
            is_sharded: Whether ranks are to have shards of its own parameters.

        Raises:
            UserError: What another model has is not computed with as it is, or in another precision, or updated on
                other ranks; or the rest is on the meta device.
        """
        parameters = dict(named_parameters(model))
        found = {name: next((e for e in engines if e.owns_parameter(id(p))), None) for name, p in parameters.items()}
        self._left = {id(parameters[name]): (parameters[name], owner) for name, owner in found.items() if owner}
        self.names = [name for name, owner in found.items() if owner]
        self.owners: list[E] = [*{id(owner): owner for _, owner in self._left.values()}.values()]
        if self._left and (is_sharded or any(owner.schedule.shards_parameters for owner in self.owners)):
            raise UserError(
                f"parallelize: {self.names[0]} belongs to another parallel model already: parallelize the outermost "
                "model alone, or one that has both, or call pl.release on the other. Up to zero 2 both may have it"
            )
        if self._left and any(tensor.is_meta for tensor in (*parameters.values(), *model.buffers())):
            raise UserError(
                f"parallelize: {self.names[0]} belongs to another parallel model, too, while other parts of this one "
                "are on the meta device: make these on the device, by to_empty and their own initialisation"
            )
        for setting in ("precision", "collective"):
            own, others = getattr(strategy, setting), {getattr(e.schedule.strategy, setting) for e in self.owners}
            if others - {own}:
                raise UserError(
                    f"parallelize: {self.names[0]} belongs to another parallel model, too, whose strategy.{setting} is "
                    f"{min(others - {own})}, and this one's is {own}: give both the same"
                )

    def equalise(self, send: Callable[[Iterable[Tensor]], None]) -> None:
        """Lets `send` give every rank rank 0's values where they have come to differ. A collective call."""
        for owner in self.owners:
            with owner.full_parameters():
                if len(set(all_gather_json(weights_hash(self.of(owner)), "parameters that two models have"))) > 1:
                    send(parameter.data for parameter in self.of(owner))

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter is another model's."""
        return id(parameter) in self._left

    def of(self, owner: Any) -> list[nn.Parameter]:
        """Those that are one engine's."""
        return [parameter for parameter, whose in self._left.values() if whose is owner]

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
        for name, (_, owner) in zip(self.names, self._left.values(), strict=True):
            if owner.state.is_over:
                raise EngineError(
                    f"{name} belonged to another parallel model, which was released since, so its gradients would not "
                    "be reduced: call pl.release(model) on this one, too, and pl.parallelize(model) again"
                )
