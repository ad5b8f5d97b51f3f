"""Models without memory, their shapes alone; and with memory, but no values yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Built = TypeVar("Built")
Module = TypeVar("Module", bound=nn.Module)


def on_meta(build: Callable[[], Built]) -> Built:
    """What a function builds, without memory for its parameters and without drawing them."""
    with torch.device("meta"), _Undrawn():
        return build()


def undrawn(build: Callable[[], Module], device: torch.device) -> Module:
    """A module that a function builds, with memory on a device, of which nobody has drawn the values."""
    module = on_meta(build)
    with _Undrawn():
        return module.to_empty(device=device)


_META: dict[str, Any] = {"device": torch.device("meta")}


class _Undrawn(TorchFunctionMode):
    """Skips drawing initial weights where there is no memory for them, and what torch has no quick way for there.

    On the meta device the first draw, and the first `empty_like`, make torch import its compiler, which takes longer
    than all the rest.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_) or getattr(func, "__module__", "") == "torch.nn.init":
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        if func in (torch.allclose, torch.Tensor.allclose) and any(
            torch.is_tensor(each) and each.is_meta for each in args
        ):
            # What a model that is built checks of its values, as parametrizations.orthogonal does, holds of drawn ones.
            return True
        if func is torch.empty_like and len(args) == 1 and kwargs.keys() <= _META.keys():
            like = args[0]
            if like.is_meta and like.is_contiguous():
                return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, **(_META | dict(kwargs)))
        return func(*args, **kwargs)
