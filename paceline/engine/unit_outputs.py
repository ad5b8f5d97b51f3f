"""The outputs of units that are resharded after forward: they outlive the parameters, and their backward is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.engine.forward import ForwardPass
from paceline.engine.program import Program
from paceline.hooks.held_views import HeldViews, within
from paceline.hooks.hooked_tensors import HookedTensors
from paceline.hooks.outputs import Leftovers, own_copies, require_seen, tensors_in

Own = tuple[Any, Iterable[Tensor], Iterable[Tensor]]
"""What a unit returns, and other tensors that it leaves: see `Listener.own_outputs`."""


class UnitOutputs:
    """The outputs of one model's units, and what these keep."""

    def __init__(self, program: Program, units: Mapping[str, nn.Module], forward: ForwardPass) -> None:
        """Of a model's units, by name; `forward` tells whose parameters stay."""
        self._program, self._forward = program, forward
        self._leftovers = {name: Leftovers(unit) for name, unit in units.items()}
        self._within: dict[str, tuple[Mapping[str, Tensor], Callable[[Tensor], bool]]] = {}
        """By unit, the views of its gathered parameters, and the function that tells whether a tensor lies in them."""
        self._held_views = HeldViews()
        self.hooked = HookedTensors(program.module, units, forward.under_way)

    def begin(self, unit: str) -> None:
        """A unit is about to run."""
        schedule = self._program.schedule
        if schedule.reshards_after_forward and not self._forward.whole.is_full:
            self.hooked.begin(unit)
            if unit in schedule.slot:
                self._held_views.begin(unit)

    def own(self, unit: str, output: Any, filled: Iterable[Tensor], backward_follows: bool) -> Own:
        """See `Listener`.

        Raises:
            EngineError: No tensor can be seen in it, and a backward is to follow; or a view of parameters is elsewhere.
        """
        schedule, hooked = self._program.schedule, self.hooked.take(unit)
        stays = unit not in schedule.slot or unit in self._forward.under_way.inner or self._forward.whole.is_full
        if stays or not schedule.reshards_after_forward:
            return output, (), ()
        flat = self._program.parameters.flat
        parameters = flat.views_of(unit)
        if (known := self._within.get(unit)) is None or known[0] is not parameters:
            known = self._within[unit] = parameters, within(parameters)
        lies_within = known[1]
        kept = own_copies(output, lies_within)
        more = list(self._leftovers[unit].own(unit, parameters, lies_within))
        self._held_views.require_none(unit, parameters, lambda: (*tensors_in(output), *self._program.parameters.made))
        if not backward_follows:
            return kept, (), ()
        inside = [*hooked, *filled]
        require_seen(unit, kept, (*more, *inside))
        return kept, more, inside
