"""A tensor that was `p.grad` and holds this rank's shard alone of what that has become: reading it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from paceline.core.errors import EngineError
from paceline.tensors.calls import name_of, tensors_of

_OVERWRITES = frozenset({"zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_"})
"""Functions that overwrite their first argument with what they are given, and read nothing of it."""

_ALIASES = frozenset({"detach", "detach_", "data", "requires_grad_"})
"""Functions and attributes that give the same values again, unread."""

DESCRIPTIONS = frozenset(
    {
        *("shape", "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "ndim", "itemsize", "nbytes"),
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "data_ptr"),
        *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_contiguous", "is_floating_point", "is_complex", "is_shared"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "is_same_size", "get_device", "__len__", "__hash__"),
        *("untyped_storage", "_version", "_base", "grad", "names", "output_nr", "is_inference"),
    }
)
"""Attributes and methods that tell of a tensor and not of its values."""


class FormerGradient(Tensor):
    """A whole gradient that a loop has kept, where `p.grad` is another tensor by now.

    Under DDP it would be `p.grad` still. Here the other ranks' parts of it are not. It can be zeroed or written over
    as a whole, which makes it an ordinary tensor again.
    """

    _name: str
    _was: type[Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuses what depends on the values."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__":
            name = name_of(func)  # attributes are read, and none is set
        written = list(tensors_of(args[:1], FormerGradient)) if name in _OVERWRITES else []
        given = (*args[1:], *kwargs.values()) if written else (*args, *kwargs.values())
        read = list(tensors_of(given, FormerGradient))
        if name in ("__repr__", "__format__"):
            return f"former gradient of {read[0]._name}, of which this rank has its shard alone"
        if read and name not in DESCRIPTIONS and name not in _ALIASES:
            raise EngineError(refusal(read[0]._name))
        for former in written:
            end_former(former)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if name in _ALIASES and type(result) is Tensor:
            become_former(result, read[0]._name)
        return result


def become_former(tensor: Tensor, name: str) -> None:
    """Marks a tensor, which stays the same object, as what was the gradient of the parameter of this name."""
    former = cast(FormerGradient, tensor)
    former._was, former._name = kind_of(tensor), name
    former.__class__ = FormerGradient


def end_former(tensor: Tensor) -> None:
    """Makes a tensor what it was before it was marked, if it is."""
    if isinstance(tensor, FormerGradient):
        tensor.__class__ = tensor._was  # type: ignore[assignment]
        del tensor._was, tensor._name


def kind_of(tensor: Tensor) -> type[Tensor]:
    """The class of a tensor, of a former gradient that which it had as `p.grad`."""
    return tensor._was if type(tensor) is FormerGradient else type(tensor)


def refusal(name: str) -> str:
    """Returns the error message for a loop that uses the former gradient of the parameter of this name."""
    return (
        f"{name}: the tensor that was p.grad before backward was read or edited after it, but p.grad is another one "
        "now (this rank's shard, or of another dtype): an edit would be lost, and other ranks' parts of it are not "
        "here. Ask p.grad again after each backward, or set strategy.zero to 0 in float32, where it stays the same "
        "tensor"
    )
