"""Whose loss or gradient was not finite, agreed on with the counts of a step."""

from __future__ import annotations

import torch
from torch import Tensor


def marks(loss: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank adds to the counts for one micro-batch, without waiting for a GPU.

    Args:
        loss: The micro-batch's, 0-dim.
        rank: This rank.

    Returns:
        0-dim, zeros where the loss is finite: 1, the rank, its square. Their sums tell whether all came from one rank.
    """
    bad = (~torch.isfinite(loss.detach())).double()
    return bad, bad * rank, bad * rank**2


def whose(count: float, total: float, squares: float) -> str:
    """Says whose losses were not finite, from the sums of all ranks' `marks`; empty where none were."""
    if not count:
        return ""
    if squares * count == total**2:
        return f"the loss of rank {total / count:.0f} was not finite"
    return f"the losses of {count:.0f} micro-batches of several ranks were not finite"


def whose_gradient(count: float, total: float) -> str:
    """Says whose gradients were not finite though all losses were, from `Engine.culprits`."""
    finite = "the losses of all ranks were finite"
    if count < 0:
        return finite
    if not count:
        return f"{finite}, and their gradients before they were summed"
    if count == 1:
        return f"{finite}, the gradient of rank {total:.0f} was not"
    return f"{finite}, the gradients of {count:.0f} ranks were not"
