"""What collectives leave in the ranks' buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.collectives.algorithms import ALGORITHMS, REDUCTIONS, ROOTED
from paceline.core.collectives.rounds import chunk

NAMES = [f"{collective}/{algorithm}" for collective, known in ALGORITHMS.items() for algorithm in known]
"""Every collective by every algorithm."""

FROM_ROOTS = [name for name in NAMES if name.partition("/")[0] in ROOTED]
"""Those from or to one rank."""

TOLERANCE = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 6e-2, torch.float16: 8e-3}
"""Of sums over up to eight ranks of what `values` gives."""


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def expected(
    collective: str, rank: int, inputs: list[Tensor], scale: float = 1.0, root: int = 0
) -> tuple[Tensor, slice]:
    """What a collective leaves in a rank's buffer, in fp64, and where that can be relied on."""
    n, numel = len(inputs), inputs[0].numel()
    own, everywhere, nowhere = slice(*chunk(rank, n, numel)), slice(0, numel), slice(0, 0)
    where = {"scatter": own, "reduce_scatter": own, "barrier": nowhere}.get(collective, everywhere)
    if collective in ("reduce", "gather") and rank != root:
        where = nowhere
    if collective in ("broadcast", "scatter"):
        return inputs[root].double(), where
    if collective in REDUCTIONS:
        return scale * torch.stack([x.double() for x in inputs]).sum(0), where
    if collective in ("gather", "all_gather"):
        return torch.cat([inputs[peer][slice(*chunk(peer, n, numel))] for peer in range(n)]).double(), where
    if collective == "all_to_all":
        return torch.cat([x[own] for x in inputs]).double(), where
    assert collective == "barrier"
    return inputs[rank].double(), where
