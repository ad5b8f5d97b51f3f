"""Rank processes for the tests of `paceline bench comm`, with collectives that are right, wrong, or do not work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.bench.comm.calls import Call
from paceline.bench.comm.rank import connect, serve
from paceline.bench.comm.reference import values


class Made:
    """An all-reduce of data that is known, so that no rank need send any."""

    name = "made"

    def __init__(self, rank: int, ranks: int) -> None:
        self.algorithms = {"all_reduce": ("right", "wrong", "refused", "deadly", "*one way", "*other way")}
        self.rank, self.ranks = rank, ranks

    def call(self, op: str, algorithm: str, numel: int) -> Call:
        if algorithm == "refused":
            raise TypeError("not this\nsecond line")
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


if __name__ == "__main__":
    rank, ranks, claimed = map(int, sys.argv[1:])
    serve(connect(), rank, claimed, [Made(rank, ranks)], {"something": "not here"})
