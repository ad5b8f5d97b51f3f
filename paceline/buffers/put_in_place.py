"""Data that a loop or an optimizer put in the place of parameters', by `p.data = ...`: taken to where these lie."""

from __future__ import annotations

import torch

from paceline.buffers.flat_parameters import FlatParameters
from paceline.core.errors import EngineError


def take_given(flat: FlatParameters) -> None:
    """Takes what a loop put in the place of whole parameters.

    Of another shape it stays: it is refused before all but `pl.release`, which leaves it out.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for index in flat.managed:
            parameter, whole = flat.all[index], flat.views[index]
            if parameter.data_ptr() != whole.data_ptr() and parameter.shape == whole.shape:
                whole.copy_(parameter)


def take_updated(flat: FlatParameters) -> None:
    """Takes what an optimizer put in the place of this rank's shards.

    Raises:
        EngineError: It is of another shape.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for index in flat.managed:
            spec, parameter, shard = flat.layout.slots[index].spec, flat.all[index], flat.local[index]
            if parameter.data_ptr() == shard.data_ptr() or not spec.trainable:
                continue
            if parameter.shape != shard.shape:
                whole, part = list(parameter.shape), list(shard.shape)
                raise EngineError(
                    f"{spec.name}: the optimizer put data of shape {whole} in the place of this rank's shard, of shape "
                    f"{part}: make it of what the parameter is inside the step, or write in place"
                )
            shard.copy_(parameter)
