"""Parameters that a loop's own checkpoint is given while their values are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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
    if _saves() is None:
        return
    for tensor in given:
        if isinstance(tensor, ShardedParameter) and not _has_values(tensor):
            names = (name for name, each in model.named_parameters() if each is tensor)
            raise _saved(unit, next(names, "of another model"))


def require_unsaved(name: str, parameter: nn.Parameter) -> None:
    """Refuses to make a parameter whole for a function of a loop's own that a checkpoint computes, and was given it.

    Args:
        name: Of the parameter.
        parameter: It has no values here yet.

    Raises:
        EngineError: A checkpoint of torch's is about to compute with it, and has saved it as it was.
    """
    if (saves := _saves()) is None:
        return
    for frame in (cell.cell_contents for cell in saves.__closure__ or ()):
        if any(tensor is parameter for tensor in _given(frame)):
            raise _saved("a function", name)


def _saves() -> Callable[[Tensor], Any] | None:
    """What saves tensors, if that is a checkpoint of torch's."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None or hooks[0].__module__ != checkpoint.__name__ else hooks[0]


def _given(frame: Any) -> Iterable[Any]:
    """What a checkpoint's function is given, by the checkpoint's own record."""
    if hasattr(frame, "input_saver"):  # of torch before 2.13
        return frame.input_saver.saved_tensors  # type: ignore[no-any-return]
    return frame.get_inputs() if hasattr(frame, "get_inputs") else ()


def _saved(what: str, name: str) -> EngineError:
    return EngineError(
        f"{what} is given the parameter {name} by way of torch's checkpoint, which has saved it while its values were "
        "on other ranks (zero=3): let it be read there (by an attribute or in a closure), or leave the checkpoint to "
        "strategy.recompute"
    )


def _has_values(parameter: nn.Parameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.element_size()
