"""Transforms of `torch.func` ask before they take a sharded parameter, or its gradient: they pass its class over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, predispatch

from paceline.tensors.gradient_shard import GradientShard, become_whole
from paceline.tensors.sharded_parameter import ShardedParameter, ask

_TAKE = ((predispatch, "_add_batch_dim_impl"), (eager_transforms, "_wrap_for_grad"))
"""The functions by which `vmap`, and `grad`, `vjp`, `jvp` and those made of them, take each tensor: neither calls
`__torch_function__`, so that nothing else would tell of it."""


def follow_transforms() -> None:
    """Lets transforms ask, from now on and in the whole process. Does nothing the second time."""
    for module, name in _TAKE:
        take = getattr(module, name)
        if not hasattr(take, "asks"):
            setattr(module, name, _asking(take))


def _asking(take: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(take)
    def asking(tensor: torch.Tensor, *rest: Any) -> Any:
        if isinstance(tensor, ShardedParameter):
            # The transform has begun, and gathering is no part of it.
            with torch._C._DisableFuncTorch():
                ask(tensor, "torch.func", False)
        elif isinstance(tensor, GradientShard):
            with torch._C._DisableFuncTorch():
                become_whole([tensor], "torch.func")
        return take(tensor, *rest)

    asking.asks = True  # type: ignore[attr-defined]
    return asking
