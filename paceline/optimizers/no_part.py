"""What an optimizer holds for a parameter of which a rank's shard has no element, as a loop finds it between steps."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.core.errors import EngineError
from paceline.tensors.division import Division
from paceline.tensors.state_shard import StateShard, become_state_shard

OF_ALL = frozenset({"step", "mu_product", "eta", "mu"})
"""States of torch's optimizers that are one number for all elements of a parameter."""


class MissingStateError(EngineError, KeyError):
    """A state was asked for of a parameter of which this rank has no part. Also what a dictionary raises."""

    __str__ = Exception.__str__


class NoPart(dict[str, Any]):
    """What an optimizer holds for a parameter of which this rank has no part, as a loop finds it between steps.

    It is empty and false, and has nothing for the optimizer itself. But a loop that looks at states of the parameter's
    elements finds them as on other ranks, here without an element: so this rank takes part where they are gathered.
    """

    def __init__(self, division: Division, like: Iterable[str], dtype: torch.dtype, device: torch.device) -> None:
        """Holds nothing.

        Args:
            division: Of the parameter.
            like: Names of states of other parameters of a group alike; empty where this rank has none.
            dtype: Of what an optimizer updates.
            device: The same.
        """
        super().__init__()
        self._division, self._like, self._dtype, self._device = division, tuple(like), dtype, device
        self._made: dict[str, StateShard] = {}

    @property
    def has_others(self) -> bool:
        """Whether other ranks are known to hold states of the parameter."""
        return bool(self._like)

    def is_like(self, division: Division, like: Iterable[str]) -> bool:
        """Whether a new one would be the same."""
        return self._division is division and self._like == tuple(like)

    def __missing__(self, name: str) -> Tensor:
        """A state, without elements.

        Raises:
            MissingStateError: It is one number for the whole parameter.
        """
        if name in OF_ALL:
            raise MissingStateError(
                f"the optimizer's {name} of {self._division.parameter}, of which this rank's shard has no element: it "
                "is on the ranks that update it. Ask `if optimizer.state[p]:` first, or set strategy.zero to 0"
            )
        if name not in self._made:
            # Also inside inference mode, as others that the optimizer has made.
            with torch.inference_mode(False):
                empty = torch.empty(0, dtype=self._dtype, device=self._device)
            self._made[name] = become_state_shard(empty, self._division.of_state(name))
        return self._made[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Keeps a whole state until the next step, of which nothing is this rank's then."""
        if not isinstance(value, StateShard):
            super().__setitem__(name, value)

    def clear(self) -> None:
        """A step begins, after which all states have changed."""
        super().clear()
        for state in self._made.values():
            become_state_shard(state, state._division)

    def __contains__(self, name: object) -> bool:
        """Whether other ranks have it, as far as is known here."""
        return super().__contains__(name) or name in self._names()

    def get(self, name: str, default: Any = None) -> Any:
        """A state that other ranks have."""
        return self[name] if self.__contains__(name) else default

    def pop(self, name: str, *default: Any) -> Any:
        """A state that other ranks drop."""
        return self.get(name) if name in self._names() else super().pop(name, *default)

    def __delitem__(self, name: str) -> None:
        """Other ranks drop it."""
        self.pop(name)

    def __iter__(self) -> Iterator[str]:
        """Goes over the names."""
        return iter(self._names())

    def keys(self) -> Any:
        """The names."""
        return dict.fromkeys(self._names()).keys()

    def values(self) -> Any:
        """States without elements."""
        return {name: self[name] for name in self._names()}.values()

    def items(self) -> Any:
        """States without elements, by name."""
        return {name: self[name] for name in self._names()}.items()

    def _names(self) -> tuple[str, ...]:
        # Where an optimizer loads states, it would look for its count of steps beside them.
        return () if _is_loading() else self._like

    def __deepcopy__(self, memo: dict[int, Any]) -> NoPart:
        """A copy tells as much."""
        return NoPart(self._division, self._like, self._dtype, self._device)

    def __reduce__(self) -> Any:
        """A file has a plain dictionary, without states."""
        return (OrderedDict, ())


def _is_loading() -> bool:
    """Whether this is called for an optimizer's `load_state_dict`, torch's or one around it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == Optimizer.load_state_dict.__name__ and isinstance(
            frame.f_locals.get("self"), Optimizer
        ):
            return True
        frame = frame.f_back
    return False
