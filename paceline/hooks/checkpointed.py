"""Parameters that a loop's own checkpoint is given while their values are elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from paceline.core.errors import EngineError
from paceline.tensors.sharded_parameter import ShardedParameter


def require_whole(model: nn.Module, unit: str, given: Iterable[Tensor]) -> None:
    """Refuses what a checkpoint has saved before it could be made whole, which it would not get back in backward.

    Args:
        model: The parallel model.
        unit: The name of the unit that is about to run.
        given: The tensors among its arguments.

    Raises:
        EngineError: A checkpoint of torch's computes it, and one is a parameter that has no values here yet.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__ != checkpoint.__name__:
        return
    for tensor in given:
        if isinstance(tensor, ShardedParameter) and not _has_values(tensor):
            names = (name for name, each in model.named_parameters() if each is tensor)
            raise EngineError(
                f"{unit} is given the parameter {next(names, 'of another model')} by way of torch's checkpoint, which "
                "has saved it while its values were on other ranks (zero=3): let the block read it itself (by an "
                "attribute or in a closure), or leave the checkpoint to strategy.recompute"
            )


def _has_values(parameter: nn.Parameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.element_size()
