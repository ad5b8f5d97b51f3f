"""Activations that are computed again in backward instead of being kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_ATTENTION = [
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
]


class _Recomputed:
    """A module's forward that keeps only its inputs (Chen et al. 2016), and attention's results where asked to.

    An object and not a closure, so that a deep copy of the module computes with the copy's parameters. The module's
    hooks run around it, once: the second computing calls the forward alone.
    """

    def __init__(self, module: nn.Module, how: Literal["unit", "keep_attention"]) -> None:
        self.module, self.how = module, how
        # One that the user gave the instance, such as a compiled one.
        self.own = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any]
        forward = self.own if self.own is not None else partial(type(self.module).forward, self.module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if any(map(_is_cache, (*args, *kwargs.values()))):
            forward = _FromTheSameCache(forward, args, kwargs)
        if self.how == "unit":
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        contexts = partial(create_selective_checkpoint_contexts, _ATTENTION)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def remove(self) -> None:
        """Gives the module its own forward back."""
        del self.module.forward
        if self.own is not None:
            self.module.forward = self.own


class _FromTheSameCache:
    """A forward that adds to a cache of keys and values: computed again, it is given the cache as it was before."""

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward = forward
        self.before = [_copied(each) if _is_cache(each) else None for each in (*args, *kwargs.values())]
        self.is_first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_first:
            self.is_first = False
            return self.forward(*args, **kwargs)
        given = [
            each if before is None else _copied(before)
            for each, before in zip((*args, *kwargs.values()), self.before, strict=True)
        ]
        return self.forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))


def _is_cache(value: Any) -> bool:
    """Whether a module is given what it adds its keys and values to, as those of `transformers` are."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _copied(value: Any) -> Any:
    """A copy of an object and of those that it is made of, with the same tensors."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    if isinstance(value, (Tensor, nn.Module, type)) or not hasattr(value, "__dict__"):
        return value
    twin = copy.copy(value)
    twin.__dict__.update({name: _copied(each) for name, each in value.__dict__.items()})
    return twin


def recompute(modules: Sequence[nn.Module], how: Literal["unit", "keep_attention"], every: int) -> list[_Recomputed]:
    """Makes every `every`-th of `modules` recompute its activations in backward.

    About one more forward pass of those modules, for the memory of all but their inputs.

    Returns:
        Handles whose `remove` undoes it.
    """
    handles = [_Recomputed(module, how) for module in modules[every - 1 :: every]]
    for handle in handles:
        handle.module.forward = handle
    return handles
