"""What a message and a byte cost between the ranks of a transport, measured in a few milliseconds."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.collectives.choice import Link, Topology
from paceline.core.collectives.rounds import Algorithm, Round, Transfer

_SMALL, _LARGE = 8, 1 << 20
_REPEATS = 9


class Measured(Protocol):
    """What is asked of a transport that is measured."""

    hosts: tuple[str, ...]
    ranks_per_host: int

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Transport.allocate`."""
        ...

    def run(self, collective: str, buffer: Tensor, label: str) -> Any:
        """See `Transport.run`."""
        ...

    def run_algorithm(self, algorithm: Algorithm, buffer: Tensor, label: str) -> None:
        """Runs any algorithm on a buffer from `allocate`."""
        ...


def measure_links(transport: Measured) -> Topology:
    """The topology of a transport. A collective call; every rank gets what rank 0 measured.

    Each rank sends to the next one of its host, then to the one of its number on the next host, a message of 8 bytes
    and one of 1 MiB.
    """
    hosts, local = transport.hosts, transport.ranks_per_host
    several = len(set(hosts)) > 1
    links: list[Link | None] = []
    for possible, algorithm, sharing in (
        (local > 1 if several else len(hosts) > 1, _next_of(local or len(hosts)), 1),
        (several, _across(local or 1), local or 1),
    ):
        links.append(_link(transport, algorithm, sharing) if possible else None)
    return Topology(hosts, local, links[0], links[1])


def _link(transport: Measured, algorithm: Algorithm, sharing: int) -> Link:
    """Alpha and beta of an algorithm of one message a rank, where so many ranks share a wire."""
    buffer = transport.allocate(_LARGE, torch.uint8)
    # Not by way of the staging buffer, which the collective that this is measured for may have filled.
    figures = transport.allocate(2, torch.float64)
    for index, size in enumerate((_SMALL, _LARGE)):
        seconds = []
        for _ in range(_REPEATS if size == _SMALL else 3):
            start = time.perf_counter()
            transport.run_algorithm(algorithm, buffer[:size], "measuring")
            seconds.append(time.perf_counter() - start)
        figures[index] = statistics.median(seconds)
    transport.run("broadcast/tree", figures, "measured")
    small, large = figures.tolist()
    return Link(_rounded(small), _rounded(max(large - small, 1e-9) / (_LARGE - _SMALL) / sharing))


def _rounded(value: float) -> float:
    """To a power of two, so that one run chooses as the next one does."""
    return float(2.0 ** round(math.log2(value)))


def _next_of(count: int) -> Algorithm:
    """From each rank to the next one of its group of `count` neighbours."""

    def algorithm(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
        first, index = rank - rank % count, rank % count
        return _one_message(first + (index + 1) % count, first + (index - 1) % count, numel)

    return algorithm


def _across(count: int) -> Algorithm:
    """From each rank to the one `count` further."""

    def algorithm(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
        return _one_message((rank + count) % world_size, (rank - count) % world_size, numel)

    return algorithm


def _one_message(after: int, before: int, numel: int) -> tuple[Round, ...]:
    return (Round((Transfer(after, 0, numel),), (Transfer(before, 0, numel),), "replace"),)
