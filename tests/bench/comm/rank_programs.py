"""Rank processes for the tests of `paceline bench comm`, with collectives that are right, wrong, or do not work.

Their barriers meet in the folder of the controller's socket.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from paceline.bench.comm.calls import Call
from paceline.bench.comm.rank import ADDRESS, connect, serve
from paceline.bench.comm.reference import values


class Made:
    """An all-reduce of data that is known, so that no rank need send any."""

    name = "made"

    def __init__(self, rank: int, ranks: int) -> None:
        self.algorithms = {"all_reduce": ("right", "wrong", "refused", "deadly", "*one way", "*other way")}
        self.algorithms |= {"barrier": ("right", "idle", "hasty")}
        self.rank, self.ranks = rank, ranks
        self.numbers = itertools.count()

    def call(self, op: str, algorithm: str, numel: int) -> Call:
        if algorithm == "refused":
            raise TypeError("not this\nsecond line")
        if op == "barrier":
            return Call(torch.zeros(0), torch.zeros(0), self.barrier(algorithm), lambda: None)
        buffer = torch.zeros(numel)
        return Call(buffer, buffer, self.function(algorithm, buffer), lambda: None)

    def function(self, algorithm: str, buffer: Tensor) -> Callable[[], object]:
        total = sum(values(rank, 0, buffer.numel(), torch.float32) for rank in range(self.ranks))

        def run() -> None:
            if algorithm == "deadly" and self.rank:
                print("OSError: gone for good", file=sys.stderr, flush=True)
                os._exit(7)
            buffer.copy_(total)
            if algorithm == "wrong" and self.rank:
                buffer[:2] = 9.0

        return run

    def barrier(self, algorithm: str) -> Callable[[], object]:
        """A barrier that holds all ranks, none, or all but rank 0."""
        folder = Path(os.environ[ADDRESS]).parent

        def run() -> None:
            number = next(self.numbers)
            came = [folder / f"barrier {number}, rank {rank}" for rank in range(self.ranks)]
            came[self.rank].touch()
            if algorithm == "right" or (algorithm == "hasty" and self.rank):
                while not all(path.exists() for path in came):
                    time.sleep(1e-4)

        return run


if __name__ == "__main__":
    rank, ranks, claimed = map(int, sys.argv[1:])
    serve(connect(), rank, claimed, [Made(rank, ranks)], {"something": "not here"})
