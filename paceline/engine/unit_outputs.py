"""What units return where their parameters go again after forward: it outlives these, and its backward is noticed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.engine.full_parameters import FullParameters
from paceline.engine.program import Program
from paceline.hooks.outputs import Leftovers, own_copies, require_seen


class UnitOutputs:
    """The outputs of one model's units."""

    def __init__(self, program: Program, units: Mapping[str, nn.Module], whole: FullParameters) -> None:
        """Has seen none yet.

        Args:
            program: The model's.
            units: By name.
            whole: Tells whether all parameters are whole, so that none goes.
        """
        self._program, self._units, self._whole = program, units, whole
        self._leftovers: dict[str, Leftovers] = {}

    def own(self, unit: str, output: Any, backward_follows: bool) -> tuple[Any, Iterable[Tensor]]:
        """What a unit returns, such that it outlives the unit's parameters, and what else it leaves behind.

        Raises:
            EngineError: No tensor can be seen in it, and a backward is to follow.
        """
        schedule = self._program.schedule
        if not schedule.reshards_after_forward or unit not in schedule.slot or self._whole.is_full:
            return output, ()
        kept = own_copies(output, self._program.parameters.flat.memory_of(unit))
        if not backward_follows:
            return kept, ()
        if unit not in self._leftovers:
            self._leftovers[unit] = Leftovers(self._units[unit])
        more = list(self._leftovers[unit].with_graphs())
        require_seen(unit, kept, more)
        return kept, more
