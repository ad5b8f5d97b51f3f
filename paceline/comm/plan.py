"""Collectives as plans: who sends which elements to whom, in which round.

A plan is pure. The CPU transports execute it, `Schedule` reads its bytes from it, the documentation draws it, and
the tests hold it against the textbook's numbers, so the cost that is predicted is the cost of what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Combine = Literal["add", "replace"]


class Part(NamedTuple):
    """Elements [start, stop) exchanged with `peer`."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's part in one round: everything in a round may be in flight at once.

    With `combine="add"` what is received for a range is summed with the rank's own elements, in the order of the
    ranks; with "replace" it takes their place. What is sent is what the buffer held when the round began.
    """

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    combine: Combine
    complete: bool = False
    """With "add": the sums of this round contain every rank's elements, so a mean may be taken of them."""
    crossed: bool = False
    """Whether what comes from a peer lies in its buffer at the place of this rank's shard (an all-to-all), not at the
    same place as here."""


class Traffic(NamedTuple):
    """Bytes (or elements) that one rank sent and received."""

    sent: int
    received: int


Plan = Callable[[int, int, int], tuple[Round, ...]]
"""(rank, world size, elements) -> this rank's rounds, as many as every other rank's."""


def shard(index: int, world_size: int, numel: int) -> tuple[int, int]:
    """Range of the `index`-th of `world_size` contiguous shards, sizes differing by at most one element."""
    return numel * index // world_size, numel * (index + 1) // world_size


def shards(first: int, count: int, world_size: int, numel: int) -> tuple[tuple[int, int], ...]:
    """The ranges that `count` neighbouring shards cover, the first following the last: one range, or two."""
    last = first + count
    spans = [(first, last)] if last <= world_size else [(first, world_size), (0, last - world_size)]
    return tuple((shard(a, world_size, numel)[0], shard(b - 1, world_size, numel)[1]) for a, b in spans if b > a)


def then(*plans: Plan) -> Plan:
    """The plans one after another."""

    def plan(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
        return tuple(turn for part in plans for turn in part(rank, world_size, numel))

    return plan


def backwards(plan: Plan, combine: Combine, root_alone: bool = False) -> Plan:
    """A plan run from its end, every part travelling the other way.

    What carries a value from one rank to all collects, run backwards and adding, all ranks' values at that one: a
    broadcast becomes a reduce, an all-gather a reduce-scatter. With "replace" a scatter becomes a gather.

    Args:
        plan: The plan.
        combine: What is done with what arrives.
        root_alone: Only rank 0 ends with whole sums.
    """

    def backward(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
        turns = plan(rank, world_size, numel)[::-1]
        adding = [index for index, turn in enumerate(turns) if turn.sends]
        whole = adding[-1] if adding and combine == "add" and not (root_alone and rank) else None
        return tuple(
            Round(turn.receives, turn.sends, combine, complete=index == whole) for index, turn in enumerate(turns)
        )

    return backward


def rooted(plan: Plan, root: int) -> Plan:
    """A plan from or to rank 0 made one from or to another rank: all ranks move up, around the ring.

    Args:
        plan: The plan; what it exchanges are whole shards.
        root: The rank that plays rank 0's part; 0 leaves the plan as it is.
    """
    if not root:
        return plan

    def turned(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
        def moved(parts: tuple[Part, ...]) -> tuple[Part, ...]:
            return tuple(
                Part((part.peer + root) % world_size, *span)
                for part in parts
                for span in spans(part.start, part.stop - part.start)
            )

        def spans(first: int, count: int) -> tuple[tuple[int, int], ...]:
            if count == world_size:
                return ((0, numel),)
            return shards((first + root) % world_size, count, world_size, numel)

        # With one element a shard, ranges count shards, whose sizes differ between the ranks that swap parts.
        turns = plan((rank - root) % world_size, world_size, world_size)
        return tuple(replace(turn, sends=moved(turn.sends), receives=moved(turn.receives)) for turn in turns)

    return turned


def exchanged(plan: Plan, rank: int, world_size: int, numel: int) -> Traffic:
    """Elements that `rank` sends and receives in all rounds of a plan."""
    rounds = plan(rank, world_size, numel)
    return Traffic(
        sum(part.stop - part.start for turn in rounds for part in turn.sends),
        sum(part.stop - part.start for turn in rounds for part in turn.receives),
    )


def fuses(first: Round, second: Round, peers: Collection[int]) -> bool:
    """Whether ranks that reach each other's memory can do two rounds at once: write what they sum straight to peers.

    So it is where all `peers` give a rank the same range to sum, and take the sum in the next round.
    """
    spans = {(part.start, part.stop) for part in first.receives}
    return (
        first.combine == "add"
        and first.complete
        and second.combine == "replace"
        and len(spans) == 1
        and {(part.start, part.stop) for part in second.sends} == spans
        and all({part.peer for part in parts} == set(peers) for parts in (first.sends, first.receives, second.sends))
        and set(first.sends) == set(second.receives)
    )


def overwrites(turn: Round) -> bool:
    """Whether a rank receives in a round where peers still read what it sends, so that it must put that aside."""
    return any(
        part.start < other.stop and other.start < part.stop
        for part in turn.sends
        for other in turn.receives
        if part.start < part.stop and other.start < other.stop
    )


def seconds(plan: Plan, world_size: int, numel: int, bandwidth: float, latency: float = 0.0) -> float:
    """Alpha-beta time of a plan: in each round, the latency and the most that any rank sends or receives.

    Args:
        plan: The plan.
        world_size: Number of ranks.
        numel: Elements (or bytes).
        bandwidth: Elements (or bytes) a second that a rank can send, and receive at the same time.
        latency: Seconds per round.
    """
    per_rank = [plan(rank, world_size, numel) for rank in range(world_size)]
    total = 0.0
    for turns in zip(*per_rank, strict=True):
        sizes = [
            sum(part.stop - part.start for part in parts) for turn in turns for parts in (turn.sends, turn.receives)
        ]
        total += latency + max(sizes, default=0) / bandwidth
    return total
