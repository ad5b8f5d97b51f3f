"""This rank's shard of what an optimizer holds for a parameter: what would take it for the whole is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from paceline.core.errors import EngineError
from paceline.tensors.calls import tensors_of, writes
from paceline.tensors.gradient_shard import DESCRIPTIONS, SHAPES, is_elementwise

_ALLOWED = DESCRIPTIONS | SHAPES | {"__get__", "__set__", "__delete__", "equal", "allclose", "share_memory_"}

_COPIES = frozenset({"copy_", "_foreach_copy_"})
"""Writes that keep a state elsewhere."""


class StateShard(Tensor):
    """A state of an optimizer between two of its steps: one-dimensional, in the order of memory.

    Scaling, zeroing and other functions of each element work as on the whole state, and its shape tells of the shard.
    Rows of it, a norm or arithmetic with a tensor of the parameter's shape raise. It is saved as a plain tensor.
    """

    of: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuses what needs the whole state."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        given = list(tensors_of((args, tuple(kwargs.values())), Tensor))
        shard = next(tensor for tensor in given if isinstance(tensor, StateShard))
        with torch._C.DisableTorchFunctionSubclass():
            apart = not name.startswith("_foreach_") and any(
                tensor.dim() and tensor.shape != shard.shape for tensor in given
            )
            # A rank that has no part holds no state, and would leave unwritten what others write.
            others = (
                writes(name)
                and name not in _COPIES
                and any(tensor.dim() and not isinstance(tensor, StateShard) for tensor in tensors_of(args[:1], Tensor))
            )
            if name not in _ALLOWED and (apart or others or not is_elementwise(name)):
                raise EngineError(
                    f"{name.strip('_')} of {shard.of}: an optimizer holds this rank's shard of it, flat, so the result "
                    "would be another one on each rank. Scale, zero or drop the states of a parameter as you like, or "
                    "set strategy.zero to 0 for whole ones"
                )
            result = func(*args, **kwargs)
            # Whoever asks for a plain tensor knows what it is.
            is_shard = type(result) is Tensor and result.shape == shard.shape and func is not Tensor.as_subclass
            return become_state_shard(result.as_subclass(StateShard), shard.of) if is_shard else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is a shard, too."""
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file has plain tensors."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def become_state_shard(state: Tensor, of: str) -> StateShard:
    """Marks a state, which stays the same object.

    Args:
        state: This rank's shard.
        of: What it is, in words.
    """
    shard = cast(StateShard, state)
    shard.__class__ = StateShard
    shard.of = of
    return shard


def plain_state(state: Any) -> Any:
    """A state as a plain tensor of the same memory, or what else it is."""
    return state.as_subclass(Tensor) if isinstance(state, StateShard) else state
