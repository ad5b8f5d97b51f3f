"""The order in which units really run: the first forward shows it, and it is the same for all ranks."""

from __future__ import annotations

from paceline.comm.agreement import agree_on_order
from paceline.comm.control import all_gather_json
from paceline.engine.forward import ForwardPass
from paceline.engine.program import Program


class UnitOrder:
    """Gives the program the order of units, once.

    Attributes:
        slots_changed: Whether gradients lie elsewhere from the next step on.
    """

    def __init__(self, program: Program, forward: ForwardPass) -> None:
        """Creates an order that is not known yet: `forward` will have seen it."""
        self._program, self._forward = program, forward
        self._known = False
        self.slots_changed = False

    def reset(self) -> None:
        """After a step that was given up. A collective call."""
        if self._program.world.world_size > 1:
            # A rank that failed in the first step may not have agreed on the order that others have.
            self._known = all(all_gather_json(self._known, "pl.reset: whether the order of units is known"))

    @property
    def is_open(self) -> bool:
        """Whether `adopt` has something to do that ranks do together."""
        program = self._program
        known = self._known or program.schedule.shards_parameters
        allocates = program.gradients is None and program.schedule.copies_gradients
        return not known or allocates or self.slots_changed

    def require_followed(self) -> None:
        """Refuses to adopt an order that not all ranks come to: see `IdleRanks`."""
        self._forward.idle_ranks.require_followed()

    def adopt(self) -> None:
        """A step's first backward begins: gradients lie as the order has it from now on. Collective the first time."""
        program = self._program
        if not (self._known or program.schedule.shards_parameters):
            self.slots_changed = self._agree()
        if program.gradients is None or self.slots_changed:
            if program.schedule.shards_parameters and program.collectives is not None:
                # A rank that ran its units in another order may still wait for one to be gathered: so both are told.
                program.executor.settle_stream("gather")
                program.executor.run([program.schedule.meet("start of the first backward", "backward")])
            program.allocate_gradients()
            self.slots_changed = False

    def updated(self) -> None:
        """An optimizer has stepped. Only now does no graph need what lies gathered in slots, which the order gives.

        A collective call the first time.
        """
        program = self._program
        if self._known or not program.schedule.shards_parameters:
            return
        if self._agree():
            program.assign_slots()
            self.slots_changed = True

    def _agree(self) -> bool:
        """Adopts the order that the first forward has shown; whether it is another one than before."""
        before = self._program.schedule.order
        order = tuple(agree_on_order(self._forward.order, self._forward.under_way.inner))
        # Empty where nothing that ran told of itself, as in a reentrant checkpoint around the whole model.
        if order:
            self._program.adopt(order)
            self._known = True
        return self._program.schedule.order != before
