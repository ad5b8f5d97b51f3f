"""Which elements of a parameter each rank has, and how their gradients or states become whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

SHAPES = frozenset(
    {
        *("shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "nbytes", "__len__"),
        *("stride", "is_contiguous"),
    }
)
"""Functions and attributes that tell how a tensor's elements lie, which a shard tells of the whole."""


class Gather(Protocol):
    """Makes shards whole."""

    def __call__(self, shards: Sequence[Tensor], divisions: Sequence[Division], what: str) -> list[Tensor]:
        """A collective call.

        Args:
            shards: This rank's, flat.
            divisions: Of each.
            what: Is to be done with them, in words.
        """
        ...


@dataclass(frozen=True)
class Division:
    """The elements of a parameter that each rank has: equal for two where every rank has the same ones of both."""

    parameter: str = field(compare=False)
    """Its name."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    """Of each rank the first element and the end, in the order of memory; nothing where it has none."""
    gather: Callable[[], Gather | None] = field(compare=False, repr=False, default=lambda: None)
    """Gives what makes shards whole; None once the model is gone."""
    own: tuple[int, ...] = field(compare=False, default=())
    """Of `parts` this rank's."""
    state: str = field(compare=False, default="")
    """Which state of an optimizer is meant; empty: the gradient."""
    _of_states: dict[str, Division] = field(compare=False, repr=False, default_factory=dict)

    def of_state(self, name: str) -> Division:
        """The same for what an optimizer holds under this name."""
        if name not in self._of_states:
            self._of_states[name] = replace(self, state=name, _of_states={})
        return self._of_states[name]

    def described(self, dtype: torch.dtype) -> Tensor:
        """A tensor without memory that is like the whole."""
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device="meta")

    @property
    def label(self) -> str:
        """What a shard is of, in words."""
        return f"{self.state} of {self.parameter}" if self.state else f"{self.parameter}.grad"


WHOLE = Division("", (), (), ())
"""Of a gradient that this rank has all of."""
