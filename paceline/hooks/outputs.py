"""The outputs and attributes of a module: the tensors in them, and those that lie in its parameters' memory."""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.core.errors import EngineError
from paceline.hooks.held_views import is_view
from paceline.models.plain_values import attributes_of

_DEPTH = 3
"""Depth to which tensors are searched for in nested objects."""
_PLAIN = frozenset((int, float, bool, str, type(None)))
"""Classes of what most modules hold, or are called with, beside tensors."""


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors in a module's inputs or output: inside tuples, mappings, dataclasses and other objects."""
    if isinstance(value, Tensor):
        yield value
        return
    # As nearly all are, and many times quicker than by way of pytree.
    if type(value) in _PLAIN:
        return
    if type(value) in (tuple, list, dict):
        for member in value.values() if type(value) is dict else value:
            yield from tensors_in(member, depth)
        return
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and type(leaf) not in _PLAIN:
            for member in _members(leaf):
                yield from tensors_in(member, depth - 1)


def _members(leaf: Any) -> Iterator[Any]:
    """What an object holds that pytree does not look into: attributes, and items where its class is a collection's."""
    if isinstance(leaf, (dict, list, tuple, set, frozenset, deque, ValuesView)):
        yield from leaf.values() if isinstance(leaf, dict) else leaf
    yield from (_attributes(leaf) or {}).values()


def _attributes(leaf: Any) -> Mapping[str, Any] | None:
    """Returns the attributes of an object of a user's own class by name; None where these are not searched."""
    if isinstance(leaf, (nn.Module, type, types.ModuleType, types.FunctionType)):
        return None
    if dataclasses.is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
    return attributes_of(leaf)


def own_copies(output: Any, lies_within: Callable[[Tensor], bool]) -> Any:
    """An output whose tensors do not lie in memory that others will use: views of parameters are copied."""
    if not any(lies_within(tensor) for tensor in tensors_in(output)):
        return output

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone() if lies_within(value) else value
        if (attributes := _attributes(value)) is not None:
            for name, member in attributes.items():
                replacement = own_copies(member, lies_within)
                if replacement is not member:
                    object.__setattr__(value, name, replacement)
        if isinstance(value, (dict, list, deque)):
            for place in list(value) if isinstance(value, dict) else range(len(value)):
                if (replacement := own_copies(value[place], lies_within)) is not value[place]:
                    value[place] = replacement
        elif any(lies_within(tensor) for tensor in tensors_in(value)):
            raise EngineError(
                f"a unit returns a view of one of its parameters in a {type(value).__name__}, where it cannot be "
                "replaced by a copy. With zero=3 the parameter is not there afterwards: return a .clone() of it, or "
                "set strategy.zero to 2 or less, or strategy.accumulation to hold"
            )
        return value

    return tree_map(copied, output)


def require_seen(unit: str, output: Any, more: Iterable[Tensor]) -> None:
    """Refuses what a unit returns if no tensor can be seen in it, so that its backward would go unnoticed.

    Raises:
        EngineError: It is a generator, or holds no tensor.
    """
    if not isinstance(output, types.GeneratorType) and (
        any(True for _ in tensors_in(output)) or any(True for _ in more)
    ):
        return
    raise EngineError(
        f"{unit} returns {type(output).__name__}, in which no tensor can be seen, so paceline would not notice when "
        "its backward begins and needs its parameters again: return tensors (in tuples, mappings or objects), name a "
        "module around it in strategy.units, set strategy.accumulation to hold, or strategy.zero to 2 or less"
    )


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


class _Part:
    """A module's attributes, as they are at the time."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes, self._names = attributes, list[str]()
        self._size, self._latest = -1, ""

    def names(self) -> list[str]:
        """Of those that a module of torch's does not have: looked for anew where some have come, or gone."""
        # One that is set under a new name comes last.
        size, latest = len(self.attributes), next(reversed(self.attributes))
        if (size, latest) != (self._size, self._latest):
            self._names = [name for name in self.attributes if name not in _OF_EVERY_MODULE]
            self._size, self._latest = size, latest
        return self._names


class Leftovers:
    """Tensors that a module's forward leaves on the module or its parts, such as auxiliary losses."""

    def __init__(self, module: nn.Module) -> None:
        """Looks at a module and all its parts."""
        self._parts = [_Part(part.__dict__) for part in module.modules()]
        self._copied: dict[tuple[int, str], Tensor] = {}

    def own(
        self, unit: str, parameters: Mapping[str, Tensor], lies_within: Callable[[Tensor], bool]
    ) -> Iterator[Tensor]:
        """Makes copies of those that lie in memory that others will use; yields those that have a graph.

        Args:
            unit: The module has run as this.
            parameters: Its own, by name, gathered.
            lies_within: Tells of a tensor whether it lies in their memory.

        Raises:
            EngineError: One was left in an earlier forward, and weights may have changed since.
        """
        for place, part in enumerate(self._parts):
            attributes = part.attributes
            for name in part.names():
                value = attributes.get(name)
                if type(value) in _PLAIN:
                    continue
                if isinstance(value, Tensor):
                    if is_view(value, lies_within):
                        attributes[name] = self._copied[place, name] = value = value.clone()
                    elif value is self._copied.get((place, name)) and torch.is_grad_enabled():
                        raise EngineError(
                            f"{unit} keeps a view of one of its parameters ({', '.join(parameters)}) as {name} from "
                            "one forward to the next. With zero=3 they are gathered anew, and it stays as it was: take "
                            "it in each forward, keep a .clone(), or set strategy.zero to 2 or less"
                        )
                    if value.grad_fn is not None:
                        yield value
                elif type(value) is tuple and _PLAIN.issuperset(map(type, value)):
                    continue  # such as the shape that a layer of torch's normalises
                elif isinstance(value, (list, tuple, dict)):
                    yield from (tensor for tensor in tensors_in(value, 0) if tensor.grad_fn is not None)
