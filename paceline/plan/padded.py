"""Packed sequences of recurrent layers, taken to be of one length, as lengths are values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.plan.known_values import keep


def pack(given: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """What `torch.nn.utils.rnn.pack_padded_sequence` makes of sequences.

    Args:
        given: (time, batch, ...), or (batch, time, ...).
        lengths: (batch,); its values play no part.
        batch_first: Whether samples come first.

    Returns:
        (time x batch, ...), and how many samples each step of time has, which is all.
    """
    x = given.transpose(0, 1) if batch_first else given
    sizes = torch.empty(x.shape[0], dtype=torch.int64)
    keep(sizes, mean=x.shape[1])
    return x.flatten(0, 1), sizes


def pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """What `torch.nn.utils.rnn.pad_packed_sequence` makes of what `pack` returned, and the lengths."""
    x = data.unflatten(0, (batch_sizes.shape[0], -1))
    lengths = torch.empty(x.shape[1], dtype=torch.int64)
    keep(lengths, mean=x.shape[0])
    return x.transpose(0, 1) if batch_first else x, lengths


def is_packed(args: Sequence[Any]) -> bool:
    """Whether these are arguments of a recurrent layer of packed sequences."""
    return len(args) == 9 and isinstance(args[3], (list, tuple))


def recur_packed(func: Callable[..., Any], data: Tensor, batch_sizes: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """What a recurrent layer computes of packed sequences, by its function for padded ones.

    Args:
        func: `torch.lstm` or another, or what stands for it.
        data: (time x batch, features).
        batch_sizes: (time,).
        others: States, parameters and so on.
    """
    result, *states = func(data.unflatten(0, (batch_sizes.shape[0], -1)), *others, False)
    return result.flatten(0, 1), *states


REPLACED: dict[str, Callable[..., Any]] = {"_pack_padded_sequence": pack, "_pad_packed_sequence": pad}
"""What stands for functions of `torch._VF`."""
