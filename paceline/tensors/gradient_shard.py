"""This rank's shard of a reduced gradient, which becomes the whole one where a loop looks at it as such."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils.weak import TensorWeakRef

from paceline.core.errors import EngineError
from paceline.tensors.calls import name_of, tensors_of, writes
from paceline.tensors.division import SHAPES, WHOLE, Division, Gather
from paceline.tensors.reduced_norm import ReducedNorm, forget_norms, known_norms, may_edit
from paceline.tensors.untraced import untraced

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
        *("element_size", "is_floating_point", "is_complex", "data_ptr", "untyped_storage"),
        *("storage_offset", "get_device", "__repr__", "__hash__"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "__format__"),
        *("__deepcopy__", "is_coalesced", "is_inference", "_has_compatible_shallow_copy_type", "_is_view"),
    }
)

_ACCESS = ("__get__", "__set__", "__delete__")

_SAME_MEMORY = frozenset({"detach", "data"})
"""Give the shard itself once more."""

_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes that give other tensors of the same memory."""


class GradientShard(Tensor):
    """`p.grad` where this rank holds a shard of the reduced gradient: one-dimensional, in the order of memory.

    Scaling, zeroing and other functions of each element work as on the whole gradient, and so does its shape. Its
    2-norm is the whole gradient's, where that is known. What looks at all of it (a sum, rows, arithmetic with a tensor
    of the parameter's shape) makes it the whole gradient first, for good: the same object, and all others of its
    memory, is an ordinary tensor then. That is a collective call. While a reduction into it is still under way, it
    waits for that.
    """

    _wait: Callable[[], None] | None
    _division: Division | None
    _norm: ReducedNorm | None
    _aliases: list[TensorWeakRef]
    """All tensors of its memory, itself included."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Waits for what is under way, and has shards made whole where that is needed."""
        if TracingContext.try_get() is not None:
            # torch.compile reads a loop's function with this among its values, and would ask for its shape.
            raise torch._dynamo.exc.Unsupported("p.grad is this rank's shard of it, with which nothing is compiled")
        if any(getattr(each, "knows_gradients", False) for each in types):
            return NotImplemented
        kwargs, name = kwargs or {}, name_of(func)
        shards = list(tensors_of((args, tuple(kwargs.values())), GradientShard))
        for shard in shards:
            wait = shard.__dict__.get("_wait")
            if wait is not None:
                wait()
        with torch._C.DisableTorchFunctionSubclass():
            if any(division_of(shard) not in (None, WHOLE) for shard in shards):
                if (norms := known_norms(name, args, kwargs, GradientShard)) is not None:
                    return norms
                if name in SHAPES:
                    division = cast(Division, division_of(shards[0]))
                    return func(division.described(shards[0].dtype), *args[1:], **kwargs)
                if _is_given_whole(func, name, args):
                    return _give(shards[0], args[1])
                if _needs_whole(func, name, shards, args, kwargs):
                    become_whole(shards, name)
                    return func(*args, **kwargs)
            if may_edit(func, kwargs):
                forget_norms(shards)
            result = func(*args, **kwargs)
            # Whoever asks for a plain tensor knows what it is.
            return result if func is Tensor.as_subclass else _marked(result, shards, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is a shard, too."""
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file has the whole gradient."""
        become_whole([self], "pickling")
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


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


@untraced
def become_whole(shards: Sequence[GradientShard], what: str) -> None:
    """Makes shards of gradients, and all other tensors of their memory, whole and plain. A collective call.

    Args:
        shards: Of gradients, or computed from these element by element.
        what: Is to be done with them, for messages.

    Raises:
        EngineError: A gradient is not reduced yet, or has a graph of its own.
    """
    parts = (shard for shard in shards if type(shard) is GradientShard and division_of(shard) not in (None, WHOLE))
    chosen = {id(_aliases(shard)): shard for shard in parts}
    models: dict[int, tuple[Gather, list[GradientShard], list[Division]]] = {}
    for shard in chosen.values():
        division = cast(Division, division_of(shard))
        if (gather := division.gather()) is None:
            raise EngineError(f"{what} of {division.parameter}.grad, this rank's shard of it: its model is gone")
        if shard.requires_grad:
            raise EngineError(
                f"{what} of {division.parameter}.grad, of which this rank holds a shard, in a graph of its own: take "
                "p.grad.detach().clone() first"
            )
        _, its, divisions = models.setdefault(id(gather), (gather, [], []))
        its.append(shard)
        divisions.append(division)
    # What is made inside inference mode could not be written to outside of it.
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
        for gather, its, divisions in models.values():
            for shard, whole in zip(its, gather(its, divisions, what), strict=True):
                for alias in [each() for each in _aliases(shard)]:
                    if isinstance(alias, GradientShard):
                        alias.data = whole
                        _become_plain(alias)


def _aliases(shard: GradientShard) -> list[TensorWeakRef]:
    found: list[TensorWeakRef] | None = shard.__dict__.get("_aliases")
    if found is None:
        found = shard._aliases = [TensorWeakRef(shard)]
    return found


def _is_given_whole(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> bool:
    """Whether it is `p.grad.data = t`, with a whole gradient."""
    sets = getattr(func, "__name__", "") == "__set__" and name == "data"
    return sets and isinstance(args[0], GradientShard) and not isinstance(args[1], GradientShard)


def _give(shard: GradientShard, whole: Tensor) -> None:
    division = cast(Division, division_of(shard))
    if tuple(whole.shape) != division.shape:
        raise EngineError(
            f"{division.parameter}.grad.data was given a tensor of shape {list(whole.shape)}, where the gradient has "
            f"{list(division.shape)}"
        )
    shard.data = whole
    _become_plain(shard)


def _become_plain(shard: GradientShard) -> None:
    shard.__class__ = Tensor  # type: ignore[assignment]
    for name in ("_wait", "_division", "_norm", "_aliases"):
        shard.__dict__.pop(name, None)


def _marked(result: Any, shards: list[GradientShard], name: str) -> Any:
    """Marks what was computed elementwise from shards as a shard, too."""
    if type(result) in (list, tuple) and all(type(each) is Tensor for each in result):
        # Of functions of lists, each of whose results goes with one shard.
        return type(result)(_marked(each, [shard], name) for each, shard in zip(result, shards, strict=False))
    if type(result) is Tensor and shards and result.shape == shards[0].shape and result.dim():
        is_same = name in _SAME_MEMORY
        marked = as_shard(result, None, division_of(shards[0]), shards[0].__dict__.get("_norm") if is_same else None)
        if is_same:
            aliases = _aliases(shards[0])
            aliases[:] = [each for each in aliases if each() is not None] + [TensorWeakRef(marked)]
            marked._aliases = aliases
        return marked
    return result


def _needs_whole(
    func: Callable[..., Any], name: str, shards: list[GradientShard], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a function of shards would give another result than the shard of what it gives of whole gradients."""
    if getattr(func, "__name__", "") in _ACCESS:
        return name in _VIEWS or (name == "data" and len(shards) > 1 and _differ(shards))
    if name == "is_complex":
        # The first that collectives of torch.distributed ask, and the only thing that tells of them.
        return str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.distributed")
    if name in DESCRIPTIONS:
        # A number is told by its value.
        return name == "__format__" and any(not division.shape for division in map(division_of, shards) if division)
    if not is_elementwise(name):
        return True
    lists = [each for each in args if isinstance(each, (list, tuple))]
    together = [list(tensors_of(each, GradientShard)) for each in zip(*lists, strict=False)] if lists else [shards]
    if any(len(each) > 1 and _differ(each) for each in together):
        return True
    # Of lists each element is another's, and what is written to is of a shape of its own.
    written = args[:1] if writes(name) else ()
    if any(not isinstance(each, GradientShard) for each in tensors_of((lists, written, kwargs.get("out")), Tensor)):
        return True
    plain = (t for t in tensors_of((args, tuple(kwargs.values())), Tensor) if not isinstance(t, GradientShard))
    most = min((len(each.shape) for each in map(division_of, shards) if each not in (None, WHOLE)), default=1)
    return any(t.numel() > 1 or t.dim() > min(1, most) for t in plain)


def _differ(shards: list[GradientShard]) -> bool:
    """Whether some hold other elements than the first, on any rank: those of other parameters do, in general."""
    first = shards[0]
    return any(each.shape != first.shape or division_of(each) != division_of(first) for each in shards[1:])


def is_elementwise(name: str) -> bool:
    """Whether a function's result for an element depends on that element alone.

    Args:
        name: Its `__name__`, of an operator or of a list's function too.
    """
    if name == "__float__":
        return False  # the number is asked for, and not the dtype
    plain = name.removeprefix("_foreach_").strip("_").removeprefix("r" if name.startswith("__r") else "")
    plain = plain[1:] if name.startswith("__i") and name != "__invert__" else plain
    plain = {"truediv": "div", "rtruediv": "div", "rmul": "mul", "radd": "add", "rsub": "sub"}.get(plain, plain)
    return plain in ELEMENTWISE
