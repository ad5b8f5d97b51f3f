"""How often a tensor was written to."""

from __future__ import annotations

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """The version of a tensor, which writes raise; -1 of one that inference mode made, which has none."""
    return -1 if tensor.is_inference() else tensor._version
