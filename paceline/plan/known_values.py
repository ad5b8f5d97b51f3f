"""What is known of the values of tensors that have none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Storages are the same for all views, and for what autograd makes of a tensor that it keeps.


@dataclass(frozen=True)
class Known:
    """What is known of a tensor's values.

    Attributes:
        choices: Of how many things each element names one; 0 where that is not known.
        mean: Of all elements; of a mask the share of those that are true.
        is_uniform: Whether they are random numbers from 0 to 1.
        is_sum: Whether each is the sum of all until it, of which `mean` is the mean.
    """

    choices: int = 0
    mean: float | None = None
    is_uniform: bool = False
    is_sum: bool = False


_NOTHING = Known()


def keep(
    tensor: Tensor, choices: int = 0, mean: float | None = None, is_uniform: bool = False, is_sum: bool = False
) -> None:
    """Notes what is known of the values of a tensor without memory: see `Known`."""
    storage: Any = tensor.untyped_storage()
    storage.paceline_known = Known(choices, mean, is_uniform, is_sum)


def keep_as(tensor: Tensor, like: Tensor) -> None:
    """Notes that as much is known of a tensor's values as of another's."""
    storage: Any = tensor.untyped_storage()
    storage.paceline_known = known(like)


def known(tensor: Tensor) -> Known:
    """What is known of a tensor's values."""
    return getattr(tensor.untyped_storage(), "paceline_known", _NOTHING)


def choices_of(tensor: Tensor) -> int:
    """Of how many things each element names one; 0 where that is not known."""
    return known(tensor).choices


def mean_of(tensor: Tensor) -> float | None:
    """The mean of all elements; of a mask the share of those that are true."""
    return known(tensor).mean
