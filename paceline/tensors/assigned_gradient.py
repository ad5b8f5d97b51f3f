"""Parameters whose `grad` differs from them in shape or dtype, which torch compares when it is assigned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from paceline.tensors.gradient_shard import GradientShard

_GRAD: Any = torch._C.TensorBase.grad

gradient_of: Callable[[nn.Parameter], Tensor | None] = _GRAD.__get__
assign_gradient: Callable[[nn.Parameter, Tensor | None], None] = _GRAD.__set__
"""Both take a parameter of any class, inside `DisableTorchFunctionSubclass`: as `p.grad`, which each step looks at for
every parameter several times, but with none of Python's in between."""


def _get(parameter: nn.Parameter) -> Tensor | None:
    if TracingContext.try_get() is not None:
        # torch.compile describes a parameter with its gradient, and what it compiles is not about that.
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return gradient_of(parameter)


def _assign(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is None:
        # As each step does to all: what the parameter tells of itself takes a while.
        with torch._C.DisableTorchFunctionSubclass():
            assign_gradient(parameter, None)
        return
    # Between steps a parameter tells the dtype of its update, in which a loop may make its gradient.
    former, shape, dtype = _get(parameter), parameter.shape, parameter.dtype
    with torch._C.DisableTorchFunctionSubclass():
        replaces = isinstance(gradient, GradientShard) or (
            isinstance(gradient, Tensor)
            and gradient.shape in (shape, former is not None and former.shape)
            and (gradient.dtype in (dtype, former is not None and former.dtype) or _widens(gradient.dtype, dtype))
        )
    if replaces:
        set_gradient(parameter, gradient)
    else:
        _set(parameter, gradient)


def _widens(gradient: torch.dtype, computed: torch.dtype) -> bool:
    """Whether a gradient is as wide as reduced ones are, which a loop may have kept when it dropped them."""
    return gradient is torch.float32 and computed in (torch.bfloat16, torch.float16)


def _set(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(parameter, gradient)


class ReducedGradParameter(nn.Parameter):
    """A user's own parameter object while its gradient is reduced: a loop may replace that, as `p.grad = 2 * p.grad`.

    A parameter becomes one, and plain again, by `__class__`.
    """

    grad = property(_get, _assign, lambda parameter: _set(parameter, None))


def give_gradient(parameter: nn.Parameter, memory: Tensor, is_marked: bool) -> Tensor:
    """Makes a new tensor over the memory of another, of any shape and dtype, a parameter's `grad`.

    As `set_gradient`, in half the time, as each step does so for all parameters; to be called inside
    `DisableTorchFunctionSubclass`.

    Args:
        parameter: Gets it.
        memory: Is what it will be.
        is_marked: Whether it is about to become a tensor of another class, as a shard.

    Returns:
        The new tensor.
    """
    gradient = parameter.data
    differs = is_marked or memory.shape != gradient.shape or memory.dtype != gradient.dtype
    assign_gradient(parameter, gradient)
    gradient.data = memory
    if differs and type(parameter) is nn.Parameter:
        parameter.__class__ = ReducedGradParameter
    return gradient


def set_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Makes any tensor a parameter's `grad`: torch compares shape and dtype only when it is assigned."""
    with torch._C.DisableTorchFunctionSubclass():
        shown = parameter.data
        if shown.shape == gradient.shape and shown.dtype == gradient.dtype:
            _GRAD.__set__(parameter, gradient)
            if type(gradient) is Tensor:
                return
        else:
            # The gradient poses as of the parameter's kind, not the reverse: torch gives a parameter whose data are of
            # another dtype, even for a moment, another node to accumulate in than graphs have that are yet to run
            # backward.
            own = gradient.data
            gradient.data = shown
            _GRAD.__set__(parameter, gradient)
            gradient.data = own
        if type(parameter) is nn.Parameter:
            parameter.__class__ = ReducedGradParameter
