"""Streams that do all that the order of streams allows: a collective starts late, and holds its memory all the while.

A GPU may begin a collective as soon as what it comes after is done, read its sources then, write its destinations from
then on, and be complete much later. A thread that begins at once and is quick shows none of it. Here a collective takes
a copy of what it reads and writes when it could first begin, fills what it writes with NaN, sleeps, puts everything
back as it was, runs, and sleeps again. Where everything that needs it waits for it, and it for all that it needs, this
changes nothing. Else somebody reads NaN, or what was written in between is gone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from paceline.comm.streams import Pending, ThreadStream
from paceline.comm.world import World
from paceline.core.collectives.rounds import Traffic
from paceline.core.layout import Bucket
from paceline.core.ops import Op
from paceline.engine.program import Program

LATEST = 2e-3
"""Seconds that a collective starts, and ends, late at most, where nobody asks for more."""


class Held:
    """A collective that knows the memory it is about."""

    def __init__(self, work: Callable[[], Traffic], reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self._work = work
        self._reads, self._writes = [_bytes(t) for t in reads], [_bytes(t) for t in writes]
        self._before: list[tuple[Tensor, Tensor]] = []
        self._may_begin = False

    def may_begin(self) -> None:
        """What it comes after is done."""
        if not self._may_begin:
            self._may_begin = True
            self._before = [(memory, memory.clone()) for memory in (*self._reads, *self._writes)]
            for memory in self._writes:
                # Of every floating dtype, all bits set are NaN.
                memory.fill_(0xFF)

    def __call__(self) -> Traffic:
        for memory, before in self._before:
            if not torch.equal(memory, before):
                memory.copy_(before)
        return self._work()


class LateStream(ThreadStream):
    """A stream whose collectives start and end late, some more and some less."""

    def __init__(self, name: str, seed: int, least: float) -> None:
        super().__init__(f"late {name}")
        self._least = least
        self._random = random.Random(f"{name} {seed}")
        self._last: Pending | None = None

    def submit(self, work: Callable[[], Traffic], label: str, after: Sequence[Pending] = ()) -> Pending:
        held = work if isinstance(work, Held) else None
        starts_late, ends_late = (
            self._least + self._random.choice((0.0, self._random.uniform(0, LATEST))) for _ in range(2)
        )
        earlier = after if self._last is None else (*after, self._last)
        at_once = all(pending.done.is_set() for pending in earlier)
        if held is not None and at_once:
            held.may_begin()

        def late() -> Traffic:
            if held is not None:
                held.may_begin()
                time.sleep(starts_late)
            traffic = work()
            time.sleep(ends_late)
            return traffic

        self._last = super().submit(late, label, after)
        return self._last


@contextmanager
def late_streams(seed: int = 0, least: float = 0.0) -> Iterator[None]:
    """Inside, models that are made parallel get such streams.

    Args:
        seed: Says which collectives are late, together with the rank.
        least: Seconds that every one is late.
    """
    work, gather_into = Program.work, Program.gather_into

    def held_work(program: Program, op: Op) -> Held:
        found = work(program, op)
        tensors = program._tensors
        return Held(found, [tensors[span] for span in op.reads], [tensors[span] for span in op.writes])

    def held_gather(program: Program, op: Op, bucket: Bucket, memory: Tensor) -> Held:
        return Held(gather_into(program, op, bucket, memory), [program.parameters.flat.shard(bucket)], [memory])

    def open_stream(world: World, name: str) -> LateStream:
        return LateStream(name, 1000 * seed + world.rank, least)

    with (
        patch.object(Program, "work", held_work),
        patch.object(Program, "gather_into", held_gather),
        patch("paceline.executor.collectives.open_stream", open_stream),
    ):
        yield


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)
