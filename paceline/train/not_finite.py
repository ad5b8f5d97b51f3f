"""Names the ranks whose losses were not finite, from sums that travel with the statistics of a step."""

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


def describe_losses(count: float, total: float, squares: float) -> str:
    """Tells which losses were not finite, from the sums of all ranks' `marks`; empty where none were."""
    if not count:
        return ""
    if squares * count == total**2:
        return f"the loss of rank {total / count:.0f} was not finite"
    return f"the losses of {count:.0f} micro-batches of several ranks were not finite"
