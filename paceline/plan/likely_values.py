"""What operators whose results depend on values most likely return, for tensors that have none.

Choices, such as those of a mixture of experts, are taken to be even; masks of which nothing else is known to hold
everywhere, as where nothing is padded; single numbers, as they are logged, to be 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

_SAME_VALUES = frozenset({"clone", "_to_copy", "index_select"})


def likely(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator returns for tensors without memory where that depends on values; `NotImplemented` of others.

    Args:
        func: The overload of an ATen operator.
        args: Its arguments.
        kwargs: Its named arguments.
    """
    rule = _RULES.get(func.overloadpacket)
    return NotImplemented if rule is None or not isinstance(args[0], FakeTensor) else rule(func, args, kwargs)


def note(func: Any, args: Sequence[Any], result: Any) -> None:
    """Keeps what is known of a result's values, by what an operator's arguments are known to be.

    Args:
        func: The overload of an ATen operator.
        args: Its arguments.
        result: What it returned.
    """
    first = args[0] if args else None
    if not isinstance(first, FakeTensor):
        return
    name = func.overloadpacket.__name__.removesuffix("_")
    if name in ("topk", "max", "min", "sort") and isinstance(result, (tuple, list)):
        at = 2 if name == "topk" else 1
        keep(result[1], choices=first.shape[args[at] if len(args) > at else -1])
    elif name in ("argmax", "argmin", "multinomial") and result.dim():
        keep(result, choices=first.shape[-1 if name == "multinomial" else args[1]])
    elif name in _SAME_VALUES:
        keep(result, choices=_choices(first), mean=_mean(first))
    elif (mean := _mean_of(name, first, args, result)) is not None:
        keep(result, mean=mean)
    elif func._schema.is_mutable:
        keep(first)


def _mean_of(name: str, first: Tensor, args: Sequence[Any], result: Any) -> float | None:
    """The mean of a result, where that of arguments tells it."""
    other = args[1] if len(args) > 1 else None
    if name in ("isnan", "isinf"):
        return 0.0
    if name in ("eq", "ne"):
        chosen = max(_choices(first), _choices(other) if isinstance(other, Tensor) else 0)
        equal: float | None = 1 / chosen if chosen else 0.0 if isinstance(other, float) and math.isinf(other) else None
        return equal if equal is None or name == "eq" else 1 - equal
    if name == "scatter" and _choices(args[2]):
        # One for each thing that is chosen, among zeros.
        return float(args[2].shape[args[1]] / first.shape[args[1]])
    both = [_mean(each) for each in (first, other) if isinstance(each, Tensor)]
    if all(each is None for each in both):
        return None
    shares = [1.0 if each is None else each for each in both]
    if name in ("bitwise_and", "logical_and") or (name == "mul" and result.dtype == torch.bool):
        return math.prod(shares)
    if name in ("bitwise_or", "logical_or"):
        return min(1.0, sum(shares))
    if name == "sum":
        return float(shares[0] * first.numel() / max(1, result.numel()))
    if name in ("logical_not", "bitwise_not") and first.dtype == torch.bool:
        return 1 - shares[0]
    return 0.0 if (name == "any" and not shares[0]) or (name == "all" and shares[0] < 1) else None


# Storages are the same for all views, and for what autograd makes of a tensor that it keeps.


def keep(tensor: Tensor, choices: int = 0, mean: float | None = None) -> None:
    """Notes what is known of a tensor's values.

    Args:
        tensor: Without memory.
        choices: Of how many things each element names one.
        mean: Of all elements; of a mask the share of those that are true.
    """
    storage: Any = tensor.untyped_storage()
    storage.paceline_choices, storage.paceline_mean = choices, mean


def _choices(tensor: Tensor) -> int:
    """Of how many things each element names one; 0 where that is not known."""
    return getattr(tensor.untyped_storage(), "paceline_choices", 0)


def _mean(tensor: Tensor) -> float | None:
    """The mean of all elements; of a mask the share of those that are true."""
    return getattr(tensor.untyped_storage(), "paceline_mean", None)


# ---- operators


def _true(mask: Tensor) -> int:
    """How many elements are true."""
    mean = _mean(mask)
    return mask.numel() if mean is None else math.ceil(mask.numel() * mean - 1e-9)


def _nonzero(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    (mask,) = args
    return torch.empty(mask.dim(), _true(mask), dtype=torch.int64, device=mask.device).t()


def _masked_select(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    given, mask = args
    whole = math.prod(torch.broadcast_shapes(given.shape, mask.shape))
    selected: Tensor = given.new_empty(math.ceil(whole * _true(mask) / max(1, mask.numel()) - 1e-9))
    return selected


def _indexed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given, indices, *others = args
    masks = [isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices]
    if not any(masks):
        return NotImplemented
    places = [
        place
        for each, is_mask in zip(indices, masks, strict=True)
        for place in (_nonzero(func, [each], {}).unbind(1) if is_mask else [each])
    ]
    return func(given, places, *others, **kwargs)


def _bincount(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    bins = max(_choices(args[0]), kwargs.get("minlength", args[2] if len(args) > 2 else 0))
    if not bins:
        return NotImplemented
    counts = torch.empty(bins, dtype=torch.int64, device=args[0].device)
    keep(counts, mean=args[0].numel() / bins)
    return counts


def _repeat_interleave(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (times,), mean = args, _mean(args[0])
    if mean is None or kwargs.get("output_size") is not None:
        return NotImplemented
    return torch.empty(round(mean * times.numel()), dtype=torch.int64, device=times.device)


def _ctc_loss(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    steps, batch, _ = args[0].shape
    longest = args[1].shape[1] if args[1].dim() == 2 else args[1].numel() // batch
    # Each place between labels may be blank.
    return args[0].new_empty(batch), args[0].new_empty(batch, steps, 2 * longest + 1)


def _ctc_loss_backward(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    return torch.empty_like(args[1])


def _item(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (number,) = args
    mean = _mean(number)
    if number.dtype == torch.bool:
        return mean is None or mean > 0
    if number.is_floating_point():
        # As it is written down; what is computed with it has the same shape whatever it is.
        return 1.0
    if mean is None:
        return NotImplemented
    # Whole numbers that add up, as sizes of parts do.
    several = number.untyped_storage().nbytes() // number.itemsize
    each, rest = divmod(round(mean * several), several)
    return each + (number.storage_offset() < rest)


_RULES: dict[Any, Callable[..., Any]] = {
    aten.nonzero: _nonzero,
    aten.masked_select: _masked_select,
    aten.index: _indexed,
    aten.index_put: _indexed,
    aten.index_put_: _indexed,
    aten._index_put_impl_: _indexed,
    aten.bincount: _bincount,
    aten.repeat_interleave: _repeat_interleave,
    aten._ctc_loss: _ctc_loss,
    aten._ctc_loss_backward: _ctc_loss_backward,
    aten._local_scalar_dense: _item,
}
