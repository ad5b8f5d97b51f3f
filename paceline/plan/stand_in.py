"""What stands in for a block that is like others: tensors as it would return them, computed by nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from paceline.plan.observed_pass import ObservedPass


class Result(NamedTuple):
    """What a block returned.

    Attributes:
        spec: How its leaves are put together.
        leaves: Tensors' shapes alone, and what else there is.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]


def result_of(returned: Any) -> Result:
    """Remembers what a block returned, without its tensors."""
    leaves, spec = tree_flatten(returned)
    return Result(spec, tuple(map(_shape, leaves)))


def stand_in(result: Result, seen: ObservedPass, needs: Iterable[Tensor], passes: Callable[[], None]) -> Any:
    """What a block would return, which passes gradients on as it would.

    Args:
        result: Of a block like it.
        seen: The pass under way, which does not see this.
        needs: The block's inputs and parameters.
        passes: Is called when it does that.
    """
    seen.paused = True
    try:
        trained = [each for each in needs if each.requires_grad]
        made = iter(_StandIn.apply(seen, passes, [each for each in result.leaves if type(each) is _Shape], *trained))
        return tree_unflatten([next(made) if type(each) is _Shape else each for each in result.leaves], result.spec)
    finally:
        seen.paused = False


class _Shape(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _shape(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Shape(tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, seen: ObservedPass, passes: Callable[[], None], shapes: Sequence[_Shape], *needs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.seen, ctx.passes = seen, passes
        ctx.shapes = [None if each.is_leaf else _shape(each) for each in needs]
        made = tuple(torch.empty_strided(each.shape, each.stride, dtype=each.dtype) for each in shapes)
        ctx.mark_non_differentiable(*(t for t, each in zip(made, shapes, strict=True) if not each.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.passes()
        ctx.seen.paused = True
        made = [each and torch.empty_strided(each.shape, each.stride, dtype=each.dtype) for each in ctx.shapes]
        ctx.seen.paused = False
        return None, None, None, *made
