"""This rank's shard of a reduced gradient: what would take it for the whole one is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import TracingContext

from paceline.core.errors import EngineError, UserError
from paceline.tensors.calls import tensors_of
from paceline.tensors.reduced_norm import NORMS, ReducedNorm, forget_norms, known_norms, may_edit

ELEMENTWISE = frozenset(
    {
        *("mul", "div", "true_divide", "neg", "add", "sub", "clamp", "clip", "clamp_min", "clamp_max", "nan_to_num"),
        *("abs", "sign", "isfinite", "isnan", "isinf", "square", "sqrt", "copy", "zero", "fill", "lerp", "addcmul"),
        *("addcdiv", "pow", "round", "clone", "detach", "to", "float", "double", "half", "bfloat16", "contiguous"),
        *("cpu", "cuda", "requires_grad", "maximum", "minimum", "where", "sgn", "logical_not", "type", "as_subclass"),
        *("ge", "gt", "le", "lt", "eq", "ne", "nan_to_num", "masked_fill", "reciprocal", "rsqrt", "exp", "log", "tanh"),
    }
)
"""Functions of an element alone, which give each rank its shard of the whole's result."""

DESCRIPTIONS = frozenset(
    {
        *("element_size", "is_floating_point", "is_complex", "data_ptr", "is_contiguous", "untyped_storage"),
        *("storage_offset", "get_device", "__repr__", "__hash__"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "is_same_size", "__format__", "__reduce_ex__"),
        *("__deepcopy__", "is_coalesced", "_has_compatible_shallow_copy_type", "_is_view"),
    }
)

SHAPES = frozenset({"shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "T", "mT"})

_ACCESS = ("__get__", "__set__", "__delete__")

_SAME_MEMORY = frozenset({"detach", "data"})
"""Give the shard itself once more."""


@dataclass(frozen=True)
class Division:
    """The elements of a parameter that each rank has: equal for two where every rank has the same ones of both."""

    parameter: str = field(compare=False)
    """Its name."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    """Of each rank the first element and the end, in the order of memory; nothing where it has none."""


WHOLE = Division("", (), (), ())
"""Of a gradient that this rank has all of."""


class GradientShard(Tensor):
    """`p.grad` where this rank holds a shard of the reduced gradient: one-dimensional, in the order of memory.

    Scaling, zeroing and other functions of each element work as on the whole gradient. What would look at it as if it
    were whole (a sum, arithmetic with a tensor of the parameter's shape) raises; its 2-norm is the whole gradient's,
    where that is known. While a reduction into it is still under way, it waits for that first.
    """

    _wait: Callable[[], None] | None
    _division: Division | None
    _norm: ReducedNorm | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Waits for what is under way, and refuses what needs whole gradients."""
        if TracingContext.try_get() is not None:
            # torch.compile reads a loop's function with this among its values, and would ask for its shape.
            raise torch._dynamo.exc.Unsupported("p.grad is this rank's shard of it, with which nothing is compiled")
        kwargs = kwargs or {}
        shards = list(tensors_of((args, tuple(kwargs.values())), GradientShard))
        for shard in shards:
            wait = shard.__dict__.get("_wait")
            if wait is not None:
                wait()
        with torch._C.DisableTorchFunctionSubclass():
            if any(division_of(shard) != WHOLE for shard in shards):
                if (norms := known_norms(_name_of(func), args, kwargs, GradientShard)) is not None:
                    return norms
                _require_elementwise(func, shards, args, kwargs)
            if may_edit(func, kwargs):
                forget_norms(shards)
            result = func(*args, **kwargs)
            # Whoever asks for a plain tensor knows what it is.
            return result if func is Tensor.as_subclass else _marked(result, shards, _name_of(func))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is a shard, too."""
        memo[id(self)] = copied = self.clone()
        return copied


def as_shard(
    tensor: Tensor, wait: Callable[[], None] | None, division: Division | None, norm: ReducedNorm | None = None
) -> GradientShard:
    """Marks a reduced gradient.

    Args:
        tensor: Its memory.
        wait: Waits for the reduction that is under way into it; None where none is.
        division: Of the parameter; `WHOLE` where this rank has all of its gradient.
        norm: Of the whole gradient, if it is known.
    """
    return become_shard(tensor.as_subclass(GradientShard), wait, division, norm)


def become_shard(
    tensor: Tensor, wait: Callable[[], None] | None, division: Division | None, norm: ReducedNorm | None = None
) -> GradientShard:
    """Marks a reduced gradient, which stays the same object: see `as_shard`."""
    shard = cast(GradientShard, tensor)
    shard.__class__ = GradientShard
    shard._wait, shard._division, shard._norm = wait, division, norm
    return shard


def division_of(shard: GradientShard) -> Division | None:
    """Of the parameter whose gradient it is, or was computed from; None where nobody has marked it."""
    found: Division | None = shard.__dict__.get("_division")
    return found


def require_own(shard: GradientShard, division: Division, numel: int) -> None:
    """Refuses a gradient that was put in the place of another parameter's, of which ranks have other parts.

    Args:
        shard: What is `p.grad` of a parameter.
        division: Of that parameter.
        numel: How many of its elements this rank has.

    Raises:
        EngineError: It is another's, on every rank that did so, whatever the ranks have of both; or it was given other
            memory, by `p.grad.set_(t)`, which no function of a class is told of.
    """
    if division_of(shard) not in (None, division):
        raise EngineError(
            f"{division.parameter}: its p.grad is made of another parameter's, of which this rank holds a shard of "
            "other elements. Exchange what the loss computes with instead of gradients, or set strategy.zero to 0 for "
            "whole ones"
        )
    with torch._C.DisableTorchFunctionSubclass():
        if shard.shape != (numel,):
            raise EngineError(
                f"{division.parameter}: its p.grad was given memory of shape {list(shard.shape)}, by p.grad.set_(t), "
                f"where this rank's shard of the gradient is, of {numel} elements, flat. Assign p.grad = t instead"
            )


def _name_of(func: Callable[..., Any]) -> str:
    """A function's name, or that of the attribute that it gets, sets or deletes."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name in _ACCESS else name


def _marked(result: Any, shards: list[GradientShard], name: str) -> Any:
    """Marks what was computed elementwise from shards as a shard, too."""
    if type(result) in (list, tuple) and all(type(each) is Tensor for each in result):
        # Of functions of lists, each of whose results goes with one shard.
        return type(result)(_marked(each, [shard], name) for each, shard in zip(result, shards, strict=False))
    if type(result) is Tensor and shards and result.shape == shards[0].shape and result.dim():
        norm = shards[0].__dict__.get("_norm") if name in _SAME_MEMORY else None
        return as_shard(result, None, division_of(shards[0]), norm)
    return result


def _require_elementwise(
    func: Callable[..., Any], shards: list[GradientShard], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    name, attribute = getattr(func, "__name__", ""), _name_of(func)
    if attribute in SHAPES:
        raise EngineError(
            f"{attribute} of {_owner(shards)}.grad: it holds this rank's shard of the gradient, flat. Ask the "
            "parameter, whose shape the whole gradient has"
        )
    if name == "__set__" and len(shards) > 1 and _differ(shards):
        raise _refusal(f"{func.__self__.__name__} =", shards)  # type: ignore[attr-defined]
    if name == "__set__" and attribute == "data" and not isinstance(args[1], GradientShard):
        raise EngineError(
            f"{_owner(shards)}.grad.data = ...: it holds this rank's shard of the gradient, flat. Assign p.grad = t, a "
            "gradient of the parameter's shape, instead, or scale or zero p.grad as you like"
        )
    if name in _ACCESS or name in DESCRIPTIONS:
        return
    if name in NORMS and kwargs.get("dim") is None:
        raise UserError(
            f"{name} of {_owner(shards)}.grad, as torch.nn.utils.clip_grad_norm_ and get_total_norm ask: of "
            "gradients that this rank has shards of the 2-norm alone is known, from the backward that reduces a step's "
            "until somebody changes them or the optimizer steps. To clip at any time call pl.clip_grad_norm_(model, "
            "max_norm), by some parameters' norm pl.clip_grad_norm_(model, max_norm, group['params']), and for a norm "
            "alone pl.engine_of(model).grad_norm()"
        )
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        raise UserError(
            "torch.amp.GradScaler would look for infinities in this rank's shards of the gradients, and skip other "
            "steps than the rest: use pl.GradScaler, which is the same but decides for all ranks"
        )
    if name in ("__float__", "__int__", "__bool__", "__index__", "__complex__"):
        raise _refusal(name, shards)
    if name.startswith("_foreach_"):
        lists = [each for each in args if isinstance(each, (list, tuple))]
        together = [list(tensors_of(each, GradientShard)) for each in zip(*lists, strict=False)]
    else:
        together = [shards]
    if any(len(each) > 1 and _differ(each) for each in together):
        raise _refusal(name, shards)
    others = [
        t
        for t in tensors_of((args, tuple(kwargs.values())), Tensor)
        if not isinstance(t, GradientShard) and (t.numel() > 1 or t.dim() > 1)
    ]
    if not is_elementwise(name) or others:
        raise _refusal(name, shards)


def _differ(shards: list[GradientShard]) -> bool:
    """Whether some hold other elements than the first, on any rank: those of other parameters do, in general."""
    first = shards[0]
    return any(each.shape != first.shape or division_of(each) != division_of(first) for each in shards[1:])


def _owner(shards: list[GradientShard]) -> str:
    """The parameter that the first of them is the gradient of, or was computed from."""
    division = division_of(shards[0])
    return division.parameter if division is not None and division.parameter else "p"


def _refusal(name: str, shards: list[GradientShard]) -> EngineError:
    return EngineError(
        f"{name} of {_owner(shards)}.grad: it holds this rank's shard of the gradient, flat, so the result would be "
        "another one on each rank. Scale or zero it as you like. For the norm, which is also not finite where any "
        "rank's gradient is not, call pl.engine_of(model).grad_norm(); to clip it pl.clip_grad_norm_(model, max_norm); "
        "update weights by an optimizer of your own under @pl.elementwise; or set strategy.zero to 0 for whole "
        "gradients"
    )


def is_elementwise(name: str) -> bool:
    """Whether a function's result for an element depends on that element alone.

    Args:
        name: Its `__name__`, of an operator or of a list's function too.
    """
    plain = name.removeprefix("_foreach_").strip("_").removeprefix("r" if name.startswith("__r") else "")
    plain = plain[1:] if name.startswith("__i") and name != "__invert__" else plain
    plain = {"truediv": "div", "rtruediv": "div", "rmul": "mul", "radd": "add", "rsub": "sub"}.get(plain, plain)
    return plain in ELEMENTWISE
