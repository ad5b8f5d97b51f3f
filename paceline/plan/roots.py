"""What a backward pass begins from, of what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


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


def _tensors(output: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [each for each in leaves if isinstance(each, Tensor)]
