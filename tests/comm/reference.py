"""What collectives leave in the ranks' buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.plan import shard

NAMES = [f"{collective}/{algorithm}" for collective, known in ALGORITHMS.items() for algorithm in known]
"""Every collective by every algorithm."""

TOLERANCE = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 6e-2, torch.float16: 8e-3}
"""Of sums over up to eight ranks of what `values` gives."""


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def expected(collective: str, rank: int, inputs: list[Tensor], scale: float = 1.0) -> tuple[Tensor, slice]:
    """What a collective leaves in a rank's buffer, in fp64, and where that can be relied on."""
    n, numel = len(inputs), inputs[0].numel()
    own, everywhere, nowhere = slice(*shard(rank, n, numel)), slice(0, numel), slice(0, 0)
    exact = [x.double() for x in inputs]
    total = scale * torch.stack(exact).sum(0)
    gathered = torch.cat([exact[peer][slice(*shard(peer, n, numel))] for peer in range(n)])
    crossed = torch.cat([exact[peer][own] for peer in range(n)])
    return {
        "broadcast": (exact[0], everywhere),
        "reduce": (total, nowhere if rank else everywhere),
        "scatter": (exact[0], own),
        "gather": (gathered, nowhere if rank else everywhere),
        "all_gather": (gathered, everywhere),
        "reduce_scatter": (total, own),
        "all_reduce": (total, everywhere),
        "all_to_all": (crossed, everywhere),
        "barrier": (exact[rank], nowhere),
    }[collective]
