"""The outputs of units that are resharded after forward: they outlive the parameters, and their backward is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.engine.forward import ForwardPass
from paceline.engine.program import Program
from paceline.hooks.held_views import HeldViews, within
from paceline.hooks.outputs import Leftovers, own_copies, require_seen, tensors_in


class UnitOutputs:
    """The outputs of one model's units, and what these keep."""

    def __init__(self, program: Program, units: Mapping[str, nn.Module], forward: ForwardPass) -> None:
        """Of a model's units, by name; `forward` tells whose parameters stay."""
        self._program, self._forward = program, forward
        self._leftovers = {name: Leftovers(unit) for name, unit in units.items()}
        self._within: dict[str, tuple[Mapping[str, Tensor], Callable[[Tensor], bool]]] = {}
        """By unit, the views of its gathered parameters, and the function that tells whether a tensor lies in them."""
        self.held_views = HeldViews()

    def own(self, unit: str, output: Any, backward_follows: bool) -> tuple[Any, Iterable[Tensor]]:
        """Returns a unit's output without views of its parameters, and the other tensors that it leaves, likewise.

        Raises:
            EngineError: No tensor can be seen in it, and a backward is to follow; or a view of parameters is elsewhere.
        """
        schedule = self._program.schedule
        if not schedule.reshards_after_forward or unit not in schedule.slot or self._forward.whole.is_full:
            return output, ()
        if unit in self._forward.under_way.inner:
            return output, ()
        flat = self._program.parameters.flat
        parameters = flat.views_of(unit)
        if (known := self._within.get(unit)) is None or known[0] is not parameters:
            known = self._within[unit] = parameters, within(parameters)
        lies_within = known[1]
        kept = own_copies(output, lies_within)
        more = list(self._leftovers[unit].own(unit, parameters, lies_within))
        self.held_views.require_none(unit, parameters, lambda: (*tensors_in(output), *self._program.parameters.made))
        if backward_follows:
            require_seen(unit, kept, more)
        return kept, more if backward_follows else ()
