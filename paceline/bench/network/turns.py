"""Contestants that take turns on every rank, timed to the slowest rank, and the bytes that a host sends."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline as pl
from paceline.bench.network.hosts import INTERFACE


@dataclass(frozen=True)
class Contestant:
    """Something that is timed."""

    system: str
    setting: str
    size: float
    """Bytes that it has to all-reduce in a call, as they are on the wire; half an all-reduce counts as half of them."""
    call: Callable[[], object]
    settle: Callable[[], None] = lambda: None
    """Waits for what a call left running, which the next call would overlap."""


@dataclass(frozen=True)
class Timed:
    """A contestant's times."""

    case: str
    system: str
    setting: str
    size: float
    seconds: tuple[float, ...]
    """Of one call, in each round."""
    sent: float
    """Bytes that the busiest host sent in one call, headers and repetitions included."""
    processor: float
    """Seconds of processor time that all ranks took together for one call, the kernel's work in their name included."""
    compute: tuple[float, ...] = ()
    """Seconds of computing alone in each round, where there is any."""


def take_turns(
    world: pl.World, case: str, contestants: Sequence[Contestant], rounds: int, calls: int, progress: bool = False
) -> list[Timed]:
    """Times every contestant once a round, `calls` calls at a time, after a round to warm up.

    Args:
        world: The job; every rank calls this.
        case: What is done.
        contestants: Each round starts with another one, so that none always follows the same neighbour.
        rounds: Timed rounds.
        calls: Calls in a turn, between two barriers.
        progress: Whether to say so when a round begins.
    """
    seconds: list[list[float]] = [[] for _ in contestants]
    sent: list[list[float]] = [[] for _ in contestants]
    processor: list[list[float]] = [[] for _ in contestants]
    order = list(range(len(contestants)))
    for number in range(rounds + 1):
        if progress:
            say(world, f"round {number} of {rounds}" if number else "warming up")
        first = number % len(order)
        for index in order[first:] + order[:first]:
            pl.barrier()
            before, busy, start = sent_bytes(), time.process_time(), time.perf_counter()
            for _ in range(calls):
                contestants[index].call()
            contestants[index].settle()
            elapsed = (time.perf_counter() - start) / calls
            busy = (time.process_time() - busy) / calls
            pl.barrier()
            ranks = pl.all_gather_json([elapsed, (sent_bytes() - before) / calls, busy], "figures of a turn")
            if number:
                seconds[index].append(max(rank[0] for rank in ranks))
                sent[index].append(max(rank[1] for rank in ranks))
                processor[index].append(sum(rank[2] for rank in ranks))
    return [
        Timed(
            case,
            one.system,
            one.setting,
            one.size,
            tuple(seconds[index]),
            statistics.median(sent[index]),
            statistics.median(processor[index]),
        )
        for index, one in enumerate(contestants)
    ]


def sent_bytes() -> int:
    """Bytes that this host's interface has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise LookupError(f"this host has no interface {INTERFACE}")


def say(world: pl.World, words: str) -> None:
    """Lets rank 0 tell the command how far it is."""
    if world.rank == 0:
        print(json.dumps({"progress": words}), flush=True)
