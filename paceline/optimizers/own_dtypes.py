"""Which dtype an optimizer's states have, where parameters are updated in a wider one than they are computed with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from paceline.buffers.flat_parameters import FlatParameters
from paceline.optimizers.elementwise import is_of_torch

_chosen = WeakIdKeyDictionary()
"""States that optimizers made in their steps, in the narrow dtype though parameters were shown in the wide one."""


def widen_states(optimizer: Optimizer, flat: FlatParameters) -> None:
    """Makes states that were made outside of a step, as some are when an optimizer is built, as wide as the update.

    They have the dtype that is computed with, as their parameter has there. What an optimizer made in a step has the
    dtype that it chose.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for states, name, state, wide in _narrow(optimizer, flat):
            if state not in _chosen:
                states[name] = state.to(wide)


def keep_dtypes(optimizer: Optimizer, flat: FlatParameters) -> None:
    """An optimizer has stepped, or was given what it held after a step: its states stay as they are."""
    if is_of_torch(optimizer):
        # These are as wide as the parameters that they are shown.
        return
    with torch._C.DisableTorchFunctionSubclass():
        for _, _, state, _ in _narrow(optimizer, flat):
            _chosen[state] = True


def _narrow(optimizer: Optimizer, flat: FlatParameters) -> list[tuple[dict[str, Any], str, Tensor, torch.dtype]]:
    """States in the dtype that their parameter is computed with, and the other one that it is updated in."""
    if not flat.has_masters:
        return []
    found = []
    for parameter, states in optimizer.state.items():
        if (local := flat.local.get(index := flat.index_of.get(id(parameter), -1))) is None or type(states) is not dict:
            continue
        computed, wide = flat.dtype(flat.bucket_of[index]), local.dtype
        if computed != wide:
            found += [
                (states, name, state, wide)
                for name, state in states.items()
                if isinstance(state, Tensor) and state.dtype == computed
            ]
    return found
