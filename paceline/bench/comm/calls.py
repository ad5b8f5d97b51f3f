"""A collective made ready on one rank, and the two things that are done with it: checked and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.bench.comm.reference import GETS_SHARD, GIVES_SHARD, count_wrong, fill
from paceline.core.collectives.rounds import chunk

ESTIMATE_REPEATS = 3
LATE_SECONDS = 0.01
"""How late the first rank comes to a barrier that is checked; each next one by so much more."""


def _nothing() -> None:
    """For what is complete when its call returns."""


@dataclass(frozen=True)
class Call:
    """One collective over buffers that stay the same from call to call."""

    given: Tensor
    """What this rank gives."""
    result: Tensor
    """Where its result is found; may overlap `given`."""
    run: Callable[[], object]
    barrier: Callable[[], object]
    """Returns on all ranks at about the same time."""
    finish: Callable[[], object] = _nothing
    """Waits for what `run` began on a device."""


class Library(Protocol):
    """Something that runs collectives between the ranks of a group."""

    name: str
    """The transport's name in tables."""

    @property
    def algorithms(self) -> Mapping[str, Sequence[str]]:
        """Algorithms by collective. Ways of calling one thing start with a "*": the faster one counts."""
        ...

    def call(self, op: str, algorithm: str, numel: int) -> Call:
        """Makes a collective over `numel` elements ready; the number of ranks divides `numel`.

        Every rank makes the same calls in the same order. Earlier calls of this library are void then.

        Raises:
            Exception: The library cannot do it, on any rank.
        """
        ...


def in_place(op: str, buffer: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """What is given and what results, where shards lie in the buffer of a collective."""
    start, stop = chunk(rank, ranks, buffer.numel())
    own = buffer[start:stop]
    return (own if op in GIVES_SHARD else buffer), (own if op in GETS_SHARD else buffer)


def check(call: Call, op: str, rank: int, ranks: int, numel: int) -> int:
    """Runs a collective once on data of its own for each rank; returns this rank's number of wrong elements.

    Leaves zeros in the buffers: sums that are repeated in place would overflow.
    """
    # A collective that does nothing must not find an earlier one's result.
    call.result.fill_(torch.nan)
    fill(op, rank, ranks, call.given, numel)
    call.barrier()
    call.run()
    call.finish()
    # Before any rank's buffers change: peers may read them until then.
    call.barrier()
    wrong = count_wrong(op, rank, ranks, call.result, numel)
    call.given.zero_()
    call.result.zero_()
    return wrong


def come_late(call: Call, rank: int, ranks: int) -> tuple[list[float], list[float]]:
    """Runs a barrier as often as there are ranks; each time another rank is late.

    Returns:
        When this rank came and when it left, each time, by the clock that all processes of a machine share.
    """
    came, left = [], []
    for late in range(ranks):
        if rank == late:
            # More than who was late before: a barrier that does nothing lets that one stay behind.
            time.sleep((late + 1) * LATE_SECONDS)
        came.append(time.monotonic())
        call.run()
        call.finish()
        left.append(time.monotonic())
    return came, left


def count_early(came: Iterable[Sequence[float]], left: Iterable[Sequence[float]]) -> int:
    """How often a rank left a barrier before all had come.

    Args:
        came: From `come_late`, of each rank.
        left: Likewise.
    """
    each_time = zip(zip(*came, strict=True), zip(*left, strict=True), strict=True)
    return sum(time < max(coming) for coming, leaving in each_time for time in leaving)


def seconds(call: Call, repeats: int) -> float:
    """Time of one run on this rank, over `repeats` that start together and follow each other."""
    # Wakes threads and connections that have slept while others were timed.
    call.run()
    call.finish()
    call.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call.run()
    call.finish()
    return (time.perf_counter() - start) / repeats
