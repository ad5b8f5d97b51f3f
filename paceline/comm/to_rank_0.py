"""Rank 0 gets a tensor of every rank, over the memory of hosts: for what is looked at once in a while."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.control import all_gather_json
from paceline.comm.transport import CommunicationError
from paceline.comm.world import current_world


def gather_to_rank_0(tensor: Tensor, label: str) -> list[Tensor]:
    """Every rank's tensor, in rank order; none on ranks other than 0. A collective call.

    Args:
        tensor: On the CPU; of the same size and dtype on all ranks.
        label: What it is about, in words.

    Raises:
        CommunicationError: Another rank is gone, took too long, or exchanges something else.
    """
    world = current_world()
    all_gather_json(None, label)
    rows = [torch.empty_like(tensor) for _ in range(world.world_size)] if world.rank == 0 else None
    try:
        dist.gather(tensor, rows)
    except RuntimeError as error:
        raise CommunicationError(f"{label}: another rank is gone, or did not come in time: {error}") from error
    return rows or []
