"""Copies of a parallel model, in memory and in files: plain models with whole parameters."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn

ENGINE = "_paceline_engine"
SET = (ENGINE, "no_sync", "__deepcopy__", "__reduce_ex__")
"""Attributes that are set on a model while it is parallel."""


def inside(model: nn.Module) -> nn.Module:
    """The module itself, of what torch.compile has made of one, which hands on to it some of what is set, not all."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found


def copy_plain(reference: weakref.ref[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """Returns the plain copy that `copy.deepcopy` makes of a parallel model."""
    model = reference()
    assert model is not None
    ours = {name: model.__dict__.pop(name) for name in SET}
    try:
        with ours[ENGINE].forward.whole.full("copy.deepcopy(model)", edits=False):
            return copy.deepcopy(model, memo)
    finally:
        model.__dict__.update(ours)


def reduce_plain(reference: weakref.ref[nn.Module], protocol: int) -> Any:
    """Returns the plain copy that `torch.save` and pickle write of a parallel model."""
    return (_as_it_is, (copy.deepcopy(reference()),))


def _as_it_is(model: nn.Module) -> nn.Module:
    """Returns the plain copy that a file of a parallel model holds, whose hooks need it to live."""
    return model
