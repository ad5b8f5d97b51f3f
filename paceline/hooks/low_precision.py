"""What a model needs to compute in low precision, besides parameters of that dtype."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.hooks.casting import cast_inputs, cast_singular_vectors
from paceline.hooks.given_weights import round_given_weights


def compute_low(
    model: nn.Module, units: Collection[nn.Module], dtype: torch.dtype, applies: Callable[[], bool]
) -> list[RemovableHandle]:
    """Casts what spectral normalisation multiplies with, and what a model and its units are given, in each forward.

    Args:
        model: Has parameters of `dtype`.
        units: Its units.
        dtype: What it computes in.
        applies: Whether it does so now.
    """
    cast_singular_vectors(model, dtype)
    rounded = (model, *(unit for unit in units if unit is not model))
    return [*round_given_weights(rounded, dtype, applies), *cast_inputs(model, units, dtype, applies)]
