"""This rank's shard of what an optimizer holds for a parameter, of which a loop sees the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._pytree import tree_map

from paceline.core.errors import EngineError
from paceline.tensors.calls import name_of, tensors_of, writes
from paceline.tensors.division import SHAPES, Division
from paceline.tensors.gradient_shard import DESCRIPTIONS, GradientShard, become_whole, is_elementwise
from paceline.tensors.untraced import untraced
from paceline.tensors.version import version_of

_ACCESS = ("__get__", "__set__", "__delete__")

_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes that give other tensors of the same memory."""


class StateShard(Tensor):
    """A state of an optimizer between two of its steps: one-dimensional, in the order of memory.

    Scaling, zeroing and other functions of each element work as on the whole state, and so does its shape. What looks
    at all of it, or writes to rows, is given the whole, gathered for that alone: a collective call. What it writes goes
    to the shards. It is saved as a plain tensor, of this rank's shard.
    """

    knows_gradients = True
    """Calls with shards of gradients beside it are its own to make."""
    _division: Division
    _since: object
    """Another one after each step."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Has states made whole where that is needed."""
        if TracingContext.try_get() is not None:
            # As of gradients: a compiler would ask for its shape, which is not that of its memory.
            raise torch._dynamo.exc.Unsupported("a state is this rank's shard of it, with which nothing is compiled")
        kwargs, name = kwargs or {}, name_of(func)
        shards = list(tensors_of((args, tuple(kwargs.values())), StateShard))
        with torch._C.DisableTorchFunctionSubclass():
            if name in SHAPES:
                return func(shards[0]._division.described(shards[0].dtype), *args[1:], **kwargs)
            if _needs_whole(func, name, shards, args, kwargs):
                return _on_whole(func, name, args, kwargs)
            if name == "data":
                # As an alias that tells of its writes, which `data` does not.
                return become_state_shard(shards[0].detach(), shards[0]._division)
            result = func(*args, **kwargs)
            # Whoever asks for a plain tensor knows what it is.
            return result if func is Tensor.as_subclass else _of_shards(result, shards)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is a shard, too."""
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file has plain tensors."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class PartOfState(Tensor):
    """Rows, or another view, of a whole state: what is written to it goes to the shards.

    It is of the state as it was gathered: once that has changed otherwise, it is refused.
    """

    knows_gradients = True
    _gathered: _Gathered

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuses what is old, and hands on what is written."""
        kwargs, name = kwargs or {}, name_of(func)
        parts = list(tensors_of((args, tuple(kwargs.values())), PartOfState))
        for part in parts:
            part._gathered.require_new()
        if next(tensors_of((args, tuple(kwargs.values())), StateShard), None) is not None:
            result = StateShard.__torch_function__(func, types, args, kwargs)
        else:
            if gradients := list(tensors_of((args, tuple(kwargs.values())), GradientShard)):
                become_whole(gradients, name)
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        for part in tensors_of(_written(func, name, args, kwargs), PartOfState):
            part._gathered.write_back()
        return _marked(result, [part._gathered for part in parts])

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is a plain tensor."""
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """And so it is in a file."""
        return self.clone().__reduce_ex__(protocol)


class _Gathered:
    """A whole state that was gathered, and what it is of."""

    def __init__(self, shard: StateShard, whole: Tensor) -> None:
        self.whole, self.shard, self._since, self._version = whole, shard, shard._since, version_of(shard)

    def require_new(self) -> None:
        """Sees that the state is still what was gathered.

        Raises:
            EngineError: It is not.
        """
        shard = self.shard
        if type(shard) is not StateShard or (shard._since, version_of(shard)) != (self._since, self._version):
            label = shard.__dict__["_division"].label
            raise EngineError(
                f"{label}: this part of it was taken before it changed, by a step or by another write: take it anew"
            )

    def write_back(self) -> None:
        """Copies this rank's part of the whole to its shard."""
        division, flat = self.shard._division, self.whole.as_strided((self.whole.numel(),), (1,))
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            # Where it has no element that counts as a write all the same.
            self.shard.copy_(flat[slice(*(division.own or (0, 0)))])
        self._version = version_of(self.shard)


def become_state_shard(state: Tensor, division: Division) -> StateShard:
    """Marks a state, which stays the same object.

    Args:
        state: This rank's shard.
        division: Of the parameter, with the state's name.
    """
    shard = cast(StateShard, state)
    shard.__class__ = StateShard
    shard._division, shard._since = division, object()
    return shard


def become_plain_state(state: StateShard) -> None:
    """Ends what `become_state_shard` did."""
    state.__class__ = Tensor  # type: ignore[assignment]


def plain_state(state: Any) -> Any:
    """A state as a plain tensor of the same memory, or what else it is."""
    return state.as_subclass(Tensor) if isinstance(state, StateShard) else state


def _of_shards(result: Any, shards: Sequence[StateShard]) -> Any:
    """Marks what was computed from shards element by element; of lists each result goes with one of them."""
    if type(result) in (list, tuple):
        return type(result)(_of_shards(each, [shard]) for each, shard in zip(result, shards, strict=False))
    is_shard = type(result) is Tensor and result.dim() and result.shape == shards[0].shape
    return become_state_shard(result, shards[0]._division) if is_shard else result


def _needs_whole(
    func: Callable[..., Any], name: str, shards: list[StateShard], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a function of shards would give another result than the shard of what it gives of whole states."""
    kind = getattr(func, "__name__", "")
    if kind in _ACCESS:
        return name in _VIEWS or (name == "data" and kind == "__set__")
    if name in DESCRIPTIONS or name in ("share_memory_", "as_subclass"):
        # A number is told by its value.
        return name == "__format__" and not shards[0]._division.shape
    if not is_elementwise(name):
        return True
    lists = [each for each in args if isinstance(each, (list, tuple))]
    together = [list(tensors_of(each, StateShard)) for each in zip(*lists, strict=False)] if lists else [shards]
    if any(each._division != those[0]._division for those in together for each in those):
        return True
    # What has its own ways, what goes with a list's elements, and what a rank without a part would leave unwritten.
    apart = tensors_of((lists, _written(func, name, args, kwargs)), Tensor)
    least = min(len(each._division.shape) for each in shards)
    return any(not isinstance(each, StateShard) for each in apart) or any(
        isinstance(each, (GradientShard, PartOfState)) or each.numel() > 1 or each.dim() > min(1, least)
        for each in tensors_of((args, tuple(kwargs.values())), Tensor)
        if not isinstance(each, StateShard)
    )


def _written(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    sets = getattr(func, "__name__", "") == "__set__"
    return [*(args[:1] if writes(name) or sets else ()), *([kwargs["out"]] if "out" in kwargs else ())]


@untraced
def _on_whole(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function with the whole of each state, and hands on what it writes. A collective call."""
    if gradients := list(tensors_of((args, tuple(kwargs.values())), GradientShard)):
        become_whole(gradients, name)
    gathered: dict[int, _Gathered] = {}
    # What is made inside inference mode could not be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        for shard in tensors_of((args, tuple(kwargs.values())), StateShard):
            if id(shard) not in gathered:
                gathered[id(shard)] = _Gathered(shard, _gather(shard, name))

    def whole(value: Any) -> Any:
        return gathered[id(value)].whole if id(value) in gathered else value

    if getattr(func, "__name__", "") == "__set__":
        # `state.data = t`: the shard stays where it is.
        result = gathered[id(args[0])].whole.copy_(whole(args[1]))
    else:
        result = func(*tree_map(whole, tuple(args)), **tree_map(whole, dict(kwargs)))
    for shard in tensors_of(_written(func, name, args, kwargs), StateShard):
        gathered[id(shard)].write_back()
    shards = {id(each.whole): each.shard for each in gathered.values()}
    return _marked(tree_map(lambda each: shards.get(id(each), each), result), list(gathered.values()))


def _gather(shard: StateShard, name: str) -> Tensor:
    division = shard._division
    if (gather := division.gather()) is None:
        raise EngineError(f"{name.strip('_')} of {division.label}, this rank's shard of it: its model is gone")
    return gather([shard.as_subclass(Tensor)], [division], name)[0]


def _marked(result: Any, gathered: Sequence[_Gathered]) -> Any:
    """Marks what is a view of a whole state; in numpy's, nothing can be written that would not reach the shards."""
    memory = {each.whole.untyped_storage()._cdata: each for each in gathered}

    def mark(each: Any) -> Any:
        if type(each) is Tensor and (found := memory.get(each.untyped_storage()._cdata)) is not None:
            each = each.as_subclass(PartOfState)
            each._gathered = found
        elif hasattr(each, "setflags"):
            each.setflags(write=False)
        return each

    return tree_map(mark, result)
