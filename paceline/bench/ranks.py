"""Runs a function as the ranks of one job on this machine, for benchmarks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def run_ranks(n: int, function: Callable[..., Any], *args: Any, threads: int = 1, timeout: float = 3600) -> list[Any]:
    """Calls `function(*args)` in `n` fresh processes that form one job.

    Args:
        n: Number of ranks.
        function: Importable; calls `pl.init()` itself.
        args: Picklable.
        threads: Threads that each rank computes with.
        timeout: Seconds until the job is given up.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RuntimeError: A rank raised, died or took too long; all have been ended.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        started = []
        for rank in range(n):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(n),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(n),
                "PACELINE_RENDEZVOUS": f"file://{folder}/store",
                "OMP_NUM_THREADS": str(threads),
            }
            process = context.Process(target=_main, args=(theirs, environment, threads, function, args), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            results = []
            for rank, (process, pipe) in enumerate(started):
                if not pipe.poll(timeout):
                    raise RuntimeError(f"rank {rank} gave no answer within {timeout:g} s")
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    process.join()
                    raise RuntimeError(f"rank {rank} died with exit code {process.exitcode}") from None
                if kind == "error":
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results.append(value)
            return results
        finally:
            for process, _ in started:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _main(
    pipe: Connection, environment: dict[str, str], threads: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(threads)
    try:
        pipe.send(("ok", function(*args)))
    except Exception:
        pipe.send(("error", traceback.format_exc()))
