"""What ranks measure side by side, of which one may be held up by other work."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch

import paceline as pl
from paceline.calibrate import rank


def products_where_one_is_slow() -> int:
    """How many products a rank times where another program takes a core of rank 0's."""
    world = pl.init(device="cpu")
    timed = 0

    def least(run: Callable[[], object], repeats: int) -> float:
        nonlocal timed
        timed += 1
        pl.barrier()
        return 1.0 if world.rank == 0 else 0.001

    with patch.object(rank, "least", least):
        rank._ceiling(torch.float32, 1)
    assert pl.all_gather_json("ceiling", "what was measured") == ["ceiling"] * 2
    return timed


def test_a_rank_that_is_slow_ends_products_for_all(ranks) -> None:
    assert ranks(2, products_where_one_is_slow, timeout=20) == [3, 3]
