"""Copies of a parallel model, in memory and in files: plain models with whole parameters."""

from __future__ import annotations

import copy
import weakref
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn

ENGINE = "_paceline_engine"


class NoSync:
    """`model.no_sync()`, as of DDP: that of its engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> AbstractContextManager[None]:
        """Defers what gradients communicate.

        Raises:
            ValueError: The model is not parallel any more.
        """
        if (alive := self._engine()) is None:
            raise ValueError("no_sync: this model is not parallel")
        return alive.no_sync()  # type: ignore[no-any-return]


def add_to(model: nn.Module, engine: Any) -> None:
    """Sets on a model what it has while it is parallel."""
    reference = weakref.ref(model)
    added = {ENGINE: engine, "__deepcopy__": partial(copy_plain, reference)}
    added["__reduce_ex__"] = partial(reduce_plain, reference)
    if not hasattr(model, "no_sync"):
        # One of the model's own, a switch of its forward, stays.
        added["no_sync"] = NoSync(engine)
    # Not by its own `__setattr__`, which may refuse what it does not know.
    vars(model).update(added)


def take_from(model: nn.Module) -> dict[str, Any]:
    """Undoes `add_to`, and returns what had been set."""
    names = (ENGINE, "__deepcopy__", "__reduce_ex__")
    ours = (*names, "no_sync") if isinstance(vars(model).get("no_sync"), NoSync) else names
    return {name: vars(model).pop(name) for name in ours}


def inside(model: nn.Module) -> nn.Module:
    """The module itself, of what torch.compile has made of one, which hands on to it some of what is set, not all."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found


def copy_plain(reference: weakref.ref[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """Returns the plain copy that `copy.deepcopy` makes of a parallel model."""
    model = reference()
    assert model is not None
    ours = take_from(model)
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
