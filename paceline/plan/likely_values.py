"""What operators whose results depend on values most likely return, for tensors that have none.

Choices, such as those of a mixture of experts, are taken to be even; what is compared with random numbers to be as
often true as probability tells; masks of which nothing else is known to hold everywhere, as where nothing is padded;
single numbers, as they are logged, to be 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from paceline.plan.known_values import choices_of, keep, keep_as, known, mean_of

aten = torch.ops.aten

_SAME_VALUES = frozenset({"clone", "_to_copy", "index_select", "index", "gather"})
_COMPARED = {"eq": "eq", "ne": "eq", "lt": "lt", "ge": "lt", "le": "le", "gt": "le"}
"""Each comparison with that which it is, or is the contrary of."""


def likely(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], holds: bool = True) -> Any:
    """What an operator returns for tensors without memory where that depends on values; `NotImplemented` of others.

    Args:
        func: The overload of an ATen operator.
        args: Its arguments.
        kwargs: Its named arguments.
        holds: What single conditions are taken to be of which nothing is known.
    """
    rule = _RULES.get(func.overloadpacket)
    if rule is None or not isinstance(args[0], FakeTensor):
        return NotImplemented
    if rule is _item and args[0].dtype in (torch.bool, torch.uint8) and mean_of(args[0]) is None:
        return holds
    return rule(func, args, kwargs)


def note(func: Any, args: Sequence[Any], result: Any) -> None:
    """Keeps what is known of a result's values, by what an operator's arguments are known to be.

    Args:
        func: The overload of an ATen operator.
        args: Its arguments.
        result: What it returned.
    """
    first = args[0] if args else None
    name = func.overloadpacket.__name__.removesuffix("_")
    if name == "randperm":
        keep(result, choices=args[0])
        return
    if name == "randint":
        low, high = (args[0], args[1]) if isinstance(args[1], int) else (0, args[0])
        keep(result, mean=(low + high) // 2)
        return
    if name in ("rand", "rand_like") or (name == "uniform" and len(args) == 1):
        keep(result, mean=0.5, is_uniform=True)
        return
    if name in ("full", "full_like") and isinstance(args[1], float):
        keep(result, mean=args[1])
        return
    if not isinstance(first, FakeTensor):
        return
    if name in ("topk", "max", "min", "sort") and isinstance(result, (tuple, list)):
        at = 2 if name == "topk" else 1
        keep(result[1], choices=first.shape[args[at] if len(args) > at else -1])
    elif name in ("argmax", "argmin", "multinomial") and result.dim():
        keep(result, choices=first.shape[-1 if name == "multinomial" else args[1]])
    elif name == "histc":
        keep(result, mean=first.numel() / result.numel())
    elif name == "cumsum" and result.dim() == 1 and mean_of(first) is not None:
        keep(result, mean=mean_of(first), is_sum=True)
    elif name in _SAME_VALUES or (name in ("max", "min") and mean_of(first) is not None):
        keep_as(result, first)
    elif (mean := _resulting_mean(name, first, args, result)) is not None:
        keep(result, mean=mean)
    elif func._schema.is_mutable:
        keep(first)


def spoken(func: Any) -> str:
    """An operator's name, or what a model's code has that calls it.

    Args:
        func: The overload of an ATen operator.
    """
    if func is aten._local_scalar_dense.default:
        return "a tensor's value as a number or a condition (.item(), int(), .tolist(), if)"
    return str(func._schema.name).replace("::", ".")


def _resulting_mean(name: str, first: Tensor, args: Sequence[Any], result: Any) -> float | None:
    """The mean of a result, where that of arguments tells it."""
    other = args[1] if len(args) > 1 else None
    if name in ("isnan", "isinf"):
        return 0.0
    if name in _COMPARED:
        share = _share_of(_COMPARED[name], first, other, result)
        return share if share is None or name in ("eq", "lt", "le") else 1 - share
    if name == "bernoulli":
        return other if isinstance(other, float) else mean_of(first)
    if name == "scatter" and choices_of(args[2]):
        # One for each thing that is chosen, among zeros.
        return float(args[2].shape[args[1]] / first.shape[args[1]])
    if name == "sum" and first.dtype == torch.bool and mean_of(first) is None:
        return float(first.numel() / max(1, result.numel()))
    both = [mean_of(each) for each in (first, other) if isinstance(each, Tensor)]
    if all(each is None for each in both):
        return None
    shares = [1.0 if each is None else each for each in both]
    if name in ("bitwise_and", "logical_and") or (name == "mul" and _is_mask(first, other)):
        return math.prod(shares)
    if name in ("bitwise_or", "logical_or"):
        return min(1.0, sum(shares))
    if name == "sum":
        return float(shares[0] * first.numel() / max(1, result.numel()))
    if name in ("logical_not", "bitwise_not") and first.dtype == torch.bool:
        return 1 - shares[0]
    return 0.0 if (name == "any" and not shares[0]) or (name == "all" and shares[0] < 1) else None


def _share_of(name: str, first: Tensor, other: Any, result: Tensor) -> float | None:
    """How often eq, lt or le holds."""
    chosen = max(choices_of(first), choices_of(other) if isinstance(other, Tensor) else 0)
    if name == "eq":
        if isinstance(other, float) and math.isinf(other):
            return 0.0
        if chosen and not result.dim() and isinstance(other, int):
            return float(_in_turn(first) == other)
        if chosen:
            return 1 / chosen
    if not isinstance(other, Tensor) and other == 0 and not known(first).is_uniform and not choices_of(first):
        # Of what is chosen, or counted.
        return None if (mean := mean_of(first)) is None else min(1.0, max(0.0, 1 - mean))
    below = mean_of(other) if isinstance(other, Tensor) else other
    if below is None or not (most := 1 if known(first).is_uniform else choices_of(first)):
        return None
    # Of whole numbers the last counts, too.
    return min(1.0, max(0.0, (below + (name == "le" and most > 1)) / most))


def _in_turn(number: Tensor) -> int:
    """Which of the things that there are to choose a single number names: each in turn."""
    return int(number.storage_offset() % choices_of(number))


def _is_mask(*factors: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in factors)


# ---- operators


def _true(mask: Tensor) -> int:
    """How many elements are true, or not 0."""
    mean = mean_of(mask)
    return mask.numel() if mean is None else math.ceil(mask.numel() * min(1.0, mean) - 1e-9)


def _nonzero(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    (mask,) = args
    places = torch.empty(mask.dim(), _true(mask), dtype=torch.int64, device=mask.device).t()
    if mask.dim() == 1:
        keep(places, choices=mask.numel())
    return places


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
    bins = max(choices_of(args[0]), kwargs.get("minlength", args[2] if len(args) > 2 else 0))
    if not bins:
        return NotImplemented
    counts = torch.empty(bins, dtype=torch.int64, device=args[0].device)
    keep(counts, mean=args[0].numel() / bins)
    return counts


def _unique(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (given, *_), chosen = args, choices_of(args[0])
    if not chosen:
        return NotImplemented
    several = min(chosen, given.numel())
    unique, places, counts = given.new_empty(several), torch.empty_like(given), given.new_empty(several)
    keep(unique, choices=chosen)
    keep(places, choices=several)
    keep(counts, mean=given.numel() / several)
    return unique, places, counts


def _repeat_interleave(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (times,), mean = args, mean_of(args[0])
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
    mean = mean_of(number)
    if number.dtype == torch.bool and mean is not None:
        return mean >= 0.5
    if number.is_floating_point():
        # As it is written down; what is computed with it has the same shape whatever it is.
        return 1.0 if mean is None else mean
    if choices_of(number):
        return _in_turn(number)
    if mean is None:
        return NotImplemented
    # Whole numbers that add up, as sizes of parts do.
    several = number.untyped_storage().nbytes() // number.itemsize
    if known(number).is_sum:
        return round(mean * (number.storage_offset() + 1))
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
    aten._unique2: _unique,
    aten.repeat_interleave: _repeat_interleave,
    aten._ctc_loss: _ctc_loss,
    aten._ctc_loss_backward: _ctc_loss_backward,
    aten._local_scalar_dense: _item,
}
