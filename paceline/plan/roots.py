"""What a backward pass begins from, of what a model returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

LARGE = 2**20
"""Bytes of results for each sample of which a loss takes memory that counts."""


def roots_of(output: Any) -> list[Tensor]:
    """What backward begins from: a loss, numbers of a tuple that begins with one, or all results with a gradient."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = [loss] if isinstance(loss, Tensor) else _tensors(output)
    if isinstance(output, (tuple, list)) and isinstance(output[0] if output else None, Tensor) and not output[0].dim():
        found = [each for each in found if not each.dim()]
    return [each for each in found if each.requires_grad]


def without_gradient(model: nn.Module) -> str:
    """Why there is nothing to begin from, in words."""
    if not any(each.requires_grad for each in model.parameters()):
        why = "all of them are frozen"
    else:
        why = "results may be detached, no tensors, or of a reentrant checkpoint whose inputs have no gradients"
    return f"{type(model).__name__} cannot be traced: nothing that it returns has a gradient for its parameters; {why}"


def results_left(model: nn.Module, roots: Sequence[Tensor], samples: int) -> str:
    """Says, where a model returns large results and no loss of them, that no loss is counted; else nothing."""
    if any(not each.dim() for each in roots) or sum(each.nbytes for each in roots) < LARGE * samples:
        return ""
    shape = " x ".join(map(str, max(roots, key=lambda each: each.nbytes).shape))
    return (
        f"{type(model).__name__} returns {shape} numbers and no loss: what a loss outside of it takes, such as logits "
        "in float32, is not counted, and what is told to fit may not. Plan a module whose forward returns the loss"
    )


def _tensors(output: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [each for each in leaves if isinstance(each, Tensor)]
