"""A parameter that is used outside of its unit's forward, where it may be sharded or its update on its way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.buffers.edits import refuse_edit
from paceline.core.errors import EngineError
from paceline.engine.forward import ForwardPass
from paceline.engine.program import Program
from paceline.hooks.checkpointed import require_unsaved

_CONVERSIONS = frozenset({"float", "double", "half", "bfloat16", "to", "type"})
"""Methods of a parameter that modules call to convert their own to another dtype."""


class OutsideUse:
    """Makes parameters usable outside of their units, or refuses that. See `Owner`."""

    def __init__(self, program: Program, forward: ForwardPass) -> None:
        """Of one model; `forward` tells what is under way."""
        self._program, self._forward = program, forward

    def parameter_used(self, index: int, function: str, edits: bool, shape: Sequence[int] | None = None) -> None:
        """A parameter that is not usable as it is, is about to be used outside of its unit's forward.

        Raises:
            EngineError: It cannot be made usable here.
        """
        parameters, schedule = self._program.parameters, self._program.schedule
        slot = self._program.layout.slots[index]
        if shape is not None:
            slot.spec.require_shape(shape)
        if not schedule.shards_parameters:
            parameters.are_touched = True
            if edits and parameters.loses_edits:
                refuse_edit(index, parameters.flat)
            if self._forward.is_beside:
                self._program.executor.wait_beside(self._forward.updates_of(slot.spec.unit))
            else:
                self._forward.unshard(slot.spec.unit)
            return
        if edits:
            refuse_edit(index, parameters.flat)
        bucket = parameters.flat.bucket_of.get(index)
        if bucket is None or not self._forward.is_computing:
            converts = function in _CONVERSIONS
            remedy = ", convert it after pl.release(model), or not at all where it changes nothing" if converts else ""
            raise EngineError(
                f"{function} of {slot.spec.name} outside of forward and backward: with zero=3 this rank keeps only its "
                "shard of it. Use it after the step's forward has begun (call the model or its layer, not their "
                "forward()) and before its backward has ended, or read or edit it inside "
                f"`with pl.full_parameters(model):`, on every rank{remedy}"
            )
        require_unsaved(slot.spec.name, parameters.all[index])
        self._forward.pin(index, f"{slot.spec.name} is used outside of its unit")

    def dtype_seen(self, index: int, computed: torch.dtype) -> torch.dtype:
        """See `Owner`."""
        local = self._program.parameters.flat.local.get(index)
        return computed if self._forward.is_computing or local is None else local.dtype
