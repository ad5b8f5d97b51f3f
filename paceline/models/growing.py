"""What a block may add to where it is given it: collections, and caches of keys and values."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from paceline.models.plain_values import MAPPINGS, SEQUENCES, places_of

COLLECTIONS = MAPPINGS | SEQUENCES | {set}


def may_grow(value: Any) -> bool:
    """Whether a module may add to what it is given: a list, a dictionary, a set or a cache."""
    return type(value) in COLLECTIONS or is_cache(value)


def is_cache(value: Any) -> bool:
    """Whether it is what modules add their keys and values to, as those of `transformers` are."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def copied(value: Any, in_cache: bool = False) -> Any:
    """A copy of collections, and of a cache and the objects that it is made of, with the same tensors."""
    if type(value) in COLLECTIONS:
        twin = copy.copy(value)
        for place in places_of(twin):
            twin[place] = copied(twin[place], in_cache)
        return twin
    if isinstance(value, (Tensor, nn.Module, type)) or not hasattr(value, "__dict__"):
        return value
    if not in_cache and not is_cache(value):
        return value
    twin = copy.copy(value)
    twin.__dict__.update({name: copied(each, True) for name, each in value.__dict__.items()})
    return twin
