"""What a block may add to where it is given it: lists, dictionaries, and caches of keys and values."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


def may_grow(value: Any) -> bool:
    """Whether a module may add to what it is given: a list, a dictionary or a cache."""
    return type(value) in (list, dict) or is_cache(value)


def is_cache(value: Any) -> bool:
    """Whether it is what modules add their keys and values to, as those of `transformers` are."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def copied(value: Any, in_cache: bool = False) -> Any:
    """A copy of lists and dictionaries, and of a cache and the objects that it is made of, with the same tensors."""
    if type(value) is dict:
        return {key: copied(each, in_cache) for key, each in value.items()}
    if type(value) is list:
        return [copied(each, in_cache) for each in value]
    if isinstance(value, (Tensor, nn.Module, type)) or not hasattr(value, "__dict__"):
        return value
    if not in_cache and not is_cache(value):
        return value
    twin = copy.copy(value)
    twin.__dict__.update({name: copied(each, True) for name, each in value.__dict__.items()})
    return twin
