"""Data that a loop or an optimizer put in the place of parameters', by `p.data = ...`: taken to where these lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.buffers.flat_parameters import FlatParameters
from paceline.buffers.storage_uses import used_elsewhere
from paceline.core.errors import EngineError


def take_given(flat: FlatParameters, writes_over: bool = False) -> None:
    """Takes what a loop put in the place of whole parameters.

    Of another shape it stays: it is refused before all but `pl.release`, which leaves it out.

    Args:
        flat: Where they lie.
        writes_over: Whether to do so even if the loop still has what they were.

    Raises:
        EngineError: The loop still has what the parameters were, which would be written over.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        moved = [index for index in flat.managed if flat.all[index].data_ptr() != flat.views[index].data_ptr()]
        given = [index for index in moved if flat.all[index].shape == flat.views[index].shape]
        if given and not writes_over and flat.is_used_beside(len(moved)):
            raise EngineError(
                f"{flat.layout.slots[given[0]].spec.name} was given other data, by p.data = ..., while something still "
                "has a tensor of what parameters were, whose memory is to take that data: keep p.data.clone() instead, "
                "and write back by p.data.copy_(...)"
            )
        for index in given:
            flat.views[index].copy_(flat.all[index])
        note_given(flat, given)


def put_back(flat: FlatParameters) -> None:
    """Puts parameters that a loop gave other data with the same values back to where they are computed with.

    At once, as another rank's update of what ranks share would else look like an edit.
    """
    with torch._C.DisableTorchFunctionSubclass():
        parameters = ((index, flat.all[index], flat.views[index]) for index in flat.managed)
        given = [i for i, p, view in parameters if p.data_ptr() != view.data_ptr() and p.dtype == view.dtype]
        note_given(flat, given)
        for index in given:
            flat.all[index].data = flat.views[index]


def note_given(flat: FlatParameters, given: Sequence[int]) -> None:
    """Notes which memory a loop shares with parameters from now on, as far as it has tensors of that: see `p.data = t`.

    Args:
        flat: Where the parameters lie, which are about to be put back there.
        given: Indices of those whose data is the loop's.
    """
    parameters = {index: flat.all[index] for index in given}
    if flat.is_sharded or flat.shares_memory or flat.has_masters:
        data = {flat.layout.slots[index].spec.name: parameter.data for index, parameter in parameters.items()}
        flat.former.lent.keep(used_elsewhere(data, 2))
    else:
        flat.former.share(parameters)


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
