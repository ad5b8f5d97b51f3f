"""Runs a function as the ranks of one job, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.launch.pool import RankPool


def run_ranks(n: int, function: Callable[..., Any], *args: Any, threads: int = 1, timeout: float = 3600) -> list[Any]:
    """Calls `function(*args)` in `n` fresh processes that form one job on this machine.

    Args:
        n: Number of ranks.
        function: Importable; calls `pl.init()` itself.
        args: Picklable.
        threads: Threads that each rank computes with.
        timeout: Seconds until the job is given up.

    Returns:
        What each rank returned, in rank order.

    Raises:
        UserError: A rank raised one.
        RanksFailed: A rank raised something else, died or took too long; all have been ended.
    """
    with RankPool(n, threads, fresh=True) as pool:
        return pool.run(function, *args, limit=timeout)
