"""GPUs of this machine: tests that need one or two, and ranks that hold one each."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

import paceline as pl
from paceline.comm.gpu_streams import CudaStream
from paceline.comm.streams import Pending
from paceline.core.collectives.rounds import Traffic

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU: torch.cuda.is_available() is false"),
]
"""What a file of such tests has for `pytestmark`."""

on_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"NCCL wants a GPU for each rank, and torch sees {torch.cuda.device_count()}"
)

SECONDS = 300.0


def ranks_on_gpus(
    n: int, function: Callable[..., Any], *args: Any, around: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[Any]:
    """Runs a function as `n` ranks with a GPU each, inside of what `around` gives; returns what each rank returned."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="paceline-gpus-") as folder, ProcessPoolExecutor(n, context) as pool:
        found = [pool.submit(_as_rank, rank, n, folder, function, args, around) for rank in range(n)]
        return [future.result(SECONDS) for future in found]


def _as_rank(
    rank: int,
    n: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    around: Callable[[], AbstractContextManager[None]],
) -> Any:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(n),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(n),
        PACELINE_RENDEZVOUS=f"file://{folder}/store",
    )
    with around():
        pl.init(device="cuda", timeout=60)
        try:
            return function(*args)
        finally:
            pl.shutdown()


@contextmanager
def late_collectives(seed: int = 0, most: int = 2_000_000) -> Iterator[None]:
    """Inside, streams hold the GPU up before and after each collective.

    Args:
        seed: Says for how long.
        most: Cycles of the GPU's clock, about a millisecond.
    """
    drawn, submit = random.Random(seed), CudaStream.submit

    def late(self: CudaStream, work: Callable[[], Traffic], *args: Any) -> Pending:
        def slept() -> Traffic:
            torch.cuda._sleep(drawn.randrange(most))
            traffic = work()
            torch.cuda._sleep(drawn.randrange(most))
            return traffic

        return submit(self, slept, *args)

    with patch.object(CudaStream, "submit", late):
        yield
