"""How far one tensor is from another."""

from __future__ import annotations

import math

from torch import Tensor


def deviation(actual: Tensor, expected: Tensor, scale: float) -> float:
    """Largest difference of two tensors' elements, divided by `scale`.

    Returns:
        Infinite where shapes differ or an element is not a number in one of them.
    """
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    difference = (actual.detach().double() - expected.detach().double()).abs().max().item()
    return math.inf if math.isnan(difference) else difference / scale


def largest(tensor: Tensor) -> float:
    """Largest magnitude of a tensor's elements; 0 for an empty one."""
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0
