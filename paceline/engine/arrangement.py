"""A model laid out for the order in which its units run: layout, flat buffers and schedule, which belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from paceline.comm.world import World
from paceline.engine.progress import EngineError
from paceline.engine.weights import Allocate, Weights
from paceline.layout import ROOT, ParameterSpec, build_layout
from paceline.schedule import Schedule
from paceline.strategy import Strategy


class Arrangement:
    """Layout, weights and schedule of a model for one forward order.

    Attributes:
        layout: Where parameters and gradients sit.
        weights: The parameters in their flat buffers.
        schedule: The ops of a step.
    """

    def __init__(
        self,
        module: nn.Module,
        specs: Sequence[ParameterSpec],
        units: Iterable[str],
        order: tuple[str, ...],
        strategy: Strategy,
        world: World,
        counts: int,
        allocate: Allocate,
        allocate_whole: Allocate,
    ) -> None:
        """Lays the model out and moves its parameters into flat buffers.

        Args:
            module: The model.
            specs: Its parameters.
            units: Names of all units.
            order: Those that run, in the order of the forward pass.
            strategy: What is sharded, and how gradients are synchronised.
            world: The job.
            counts: Length of the counts vector.
            allocate: For parameters that are communicated every step.
            allocate_whole: For those to compute with, where they are kept whole.
        """
        # Units that do not run on their own come first: their gradients are complete last.
        resident = [unit for unit in (ROOT, *units) if unit not in order]
        self.layout = build_layout(specs, [*resident, *order], strategy, world.world_size)
        by_name = dict(module.named_parameters())
        parameters = [by_name[slot.spec.name] for slot in self.layout.slots]
        self.schedule = Schedule(self.layout, strategy, world.world_size, world.rank, order, counts=counts)
        self.weights = Weights(self.schedule, parameters, world.device, allocate, allocate_whole)
        self._identities = {id(parameter) for parameter in parameters}
        self._places = [
            (held, name, member)
            for submodule in module.modules()
            for held in (submodule._parameters, submodule._modules)
            for name, member in held.items()
        ]
        self._members = [(held, set(held)) for m in module.modules() for held in (m._parameters, m._modules)]
        self._frozen = [p for p, slot in zip(parameters, self.layout.slots, strict=True) if not slot.spec.trainable]
        self._slots = {unit: self.layout.slots_of(unit) for unit in self.layout.units}
        self._accumulators: dict[int, Node] = {}
        self.hold_accumulators(self.layout.units)
        self._follow()

    def _follow(self) -> None:
        order, on_time = self.schedule.order, set(self.schedule.on_time)
        self._after = {unit: frozenset(order[position + 1 :]) & on_time for position, unit in enumerate(order)}

    def reorder(self, order: tuple[str, ...]) -> None:
        """Schedules another forward order on the same layout; places for gathered units stay until asked for."""
        self.schedule = replace(self.schedule, order=order, late=frozenset())
        self._follow()

    def hold_accumulators(self, units: Iterable[str]) -> None:
        """Takes hold of where autograd accumulates gradients of some units, which a change of dtype creates anew.

        Autograd keeps them only as long as somebody does, and their shape is that of the parameter when they were made:
        it must be whole.
        """
        for unit in units:
            for index in self._slots[unit]:
                parameter = self.weights.parameters[index]
                if parameter.requires_grad:
                    self._accumulators[index] = get_gradient_edge(parameter).node

    def holds(self, identity: int) -> bool:
        """Whether a parameter with this `id()` is the model's."""
        return identity in self._identities

    def require_unchanged(self) -> None:
        """Refuses to go on with parameters that are not those which were laid out.

        Raises:
            EngineError: A module or parameter was replaced or added, or a parameter unfrozen or given another shape,
                since.
        """
        if not self.weights.swapped:
            # Others are sealed.
            for parameter, slot in zip(self.weights.parameters, self.layout.slots, strict=True):
                if parameter.shape != slot.spec.shape:
                    raise EngineError(
                        f"{slot.spec.name} changed its shape from {tuple(slot.spec.shape)} to {tuple(parameter.shape)} "
                        "after pl.parallelize: call pl.release(model), change it, and pl.parallelize(model) again"
                    )
        for held, name, member in self._places:
            if held.get(name) is not member:
                raise EngineError(
                    f"{name} was replaced in the model after pl.parallelize, so its gradients would not be reduced: "
                    "call pl.release(model) and pl.parallelize(model) again (load weights without assign=True)"
                )
        for held, known in self._members:
            for name in held.keys() - known if len(held) > len(known) else ():
                if _trains(held[name]):
                    raise EngineError(
                        f"{name} was added to the model after pl.parallelize, so its gradients would not be reduced: "
                        "call pl.release(model) and pl.parallelize(model) again"
                    )
        if any(parameter.requires_grad for parameter in self._frozen):
            raise EngineError(
                "a parameter was unfrozen after pl.parallelize, so its gradients would not be reduced: call "
                "pl.release(model) and pl.parallelize(model) again"
            )

    def differentiates_parameters(self) -> bool:
        """Whether the backward pass under way leaves gradients in parameters; `torch.autograd.grad` does not."""
        try:
            return any(torch._C._will_engine_execute_node(node) for node in self._accumulators.values())
        except RuntimeError:
            # A parameter is itself what autograd.grad was asked for.
            return False

    def slots_of(self, unit: str) -> tuple[int, ...]:
        """Indices of the slots of a unit."""
        return self._slots[unit]

    def units_after(self, unit: str) -> frozenset[str]:
        """Units that run after `unit` in the forward pass and whose gradients are final when its backward begins."""
        return self._after.get(unit, frozenset())

    def mark_late(self, slots: Iterable[int]) -> None:
        """From now on the units of these slots are reduced after the whole backward."""
        late = {self.layout.slots[index].spec.unit for index in slots}
        self.schedule = replace(self.schedule, late=self.schedule.late | late)
        self._follow()


def _trains(member: nn.Module | nn.Parameter | None) -> bool:
    """Whether gradients may come to a part of a model."""
    parameters = member.parameters() if isinstance(member, nn.Module) else [member]
    return any(parameter is not None and parameter.requires_grad for parameter in parameters)
