"""Activations that are computed again in backward instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from paceline.models.as_before import AsBefore, ChangedBuffers
from paceline.models.growing import is_cache

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
        self.module, self.how, self.buffers = module, how, ChangedBuffers(module)
        # One that the user gave the instance, such as a compiled one.
        self.own = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any]
        forward = self.own if self.own is not None else partial(type(self.module).forward, self.module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, nn.Parameter):
                # Another unit's, whose values may be elsewhere: what a checkpoint is given is saved as it is.
                each.detach()
        # What compiles the whole model computes again what it has captured, in which nothing is written to.
        if not torch.compiler.is_compiling() or any(map(is_cache, (*args, *kwargs.values()))):
            forward = AsBefore(forward, self.buffers, args, kwargs)
        if self.how == "unit":
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        contexts = partial(create_selective_checkpoint_contexts, _ATTENTION)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def remove(self) -> None:
        """Gives the module its own forward back, unless the loop has given it another meanwhile."""
        if self.module.__dict__.get("forward") is not self:
            return
        del self.module.forward
        if self.own is not None:
            self.module.forward = self.own


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
