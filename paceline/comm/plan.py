"""Collectives as plans: who sends which elements to whom, in which round.

A plan is pure. The CPU transports execute it, `Schedule` reads its bytes from it, and the tests hold both
against the textbook's numbers, so the cost that is predicted is the cost of what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple


class Part(NamedTuple):
    """Elements [start, stop) exchanged with `peer`."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's part in one round: everything in a round may be in flight at once.

    With `combine="add"` what is received is summed with the rank's own elements, in the order of the ranks;
    with "replace" it takes their place.
    """

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    combine: Literal["add", "replace"]
    complete: bool = False
    """With "add": the sums of this round contain every rank's elements, so a mean may be taken of them."""


class Traffic(NamedTuple):
    """Bytes (or elements) that one rank sent and received."""

    sent: int
    received: int


Plan = Callable[[int, int, int], tuple[Round, ...]]
"""(rank, world size, elements) -> this rank's rounds."""


def shard(index: int, world_size: int, numel: int) -> tuple[int, int]:
    """Range of the `index`-th of `world_size` contiguous shards, sizes differing by at most one element."""
    return numel * index // world_size, numel * (index + 1) // world_size


def direct_all_reduce(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """All-to-all of shards and a local sum, then an all-gather of the sums: two rounds.

    Each rank sends 2(N-1)/N of the buffer, as the ring does. Sums run over the ranks in rank order, hence do not
    depend on where a buffer is cut.
    """
    peers = [peer for peer in range(world_size) if peer != rank]
    own = shard(rank, world_size, numel)
    theirs = tuple(Part(peer, *shard(peer, world_size, numel)) for peer in peers)
    mine = tuple(Part(peer, *own) for peer in peers)
    return (Round(theirs, mine, "add", complete=True), Round(mine, theirs, "replace"))


def direct_reduce_scatter(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """All-to-all of shards and a local sum: the first half of `direct_all_reduce`; rank r keeps the r-th shard."""
    return direct_all_reduce(rank, world_size, numel)[:1]


def direct_all_gather(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Every rank sends its shard to every other: the second half of `direct_all_reduce`."""
    return direct_all_reduce(rank, world_size, numel)[1:]


def ring_all_reduce(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Reduce-scatter around the ring, then all-gather around it: 2(N-1) rounds.

    Each rank sends 2(N-1)/N of the buffer: 1.8 M for N=10, 1.998 M for N=1000.
    """
    after, before = (rank + 1) % world_size, (rank - 1) % world_size

    def turn(first: int, index: int, combine: Literal["add", "replace"], complete: bool) -> Round:
        send = shard((first - index) % world_size, world_size, numel)
        receive = shard((first - index - 1) % world_size, world_size, numel)
        return Round((Part(after, *send),), (Part(before, *receive),), combine, complete)

    last = world_size - 2
    return (
        *(turn(rank, index, "add", index == last) for index in range(world_size - 1)),
        *(turn(rank + 1, index, "replace", False) for index in range(world_size - 1)),
    )


def server_reduce(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Every rank sends its whole buffer to rank 0, which receives M (N-1) bytes: the server's bottleneck."""
    if rank:
        return (Round((Part(0, 0, numel),), (), "add"),)
    clients = tuple(Part(peer, 0, numel) for peer in range(1, world_size))
    return (Round((), clients, "add", complete=True),)


def server_broadcast(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Rank 0 sends its whole buffer to every other rank."""
    if rank:
        return (Round((), (Part(0, 0, numel),), "replace"),)
    return (Round(tuple(Part(peer, 0, numel) for peer in range(1, world_size)), (), "replace"),)


def tree_broadcast(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Divide and conquer from rank 0: in round k, each of the 2^k ranks that have the data sends it on once.

    ceil(log2 N) rounds: 8 ranks, 5 MB at 1 MB/s take 15 s, where one after another takes 35 s.
    """
    rounds = []
    have = 1
    while have < world_size:
        sends = (Part(rank + have, 0, numel),) if rank < have and rank + have < world_size else ()
        receives = (Part(rank - have, 0, numel),) if have <= rank < 2 * have else ()
        rounds.append(Round(sends, receives, "replace"))
        have *= 2
    return tuple(rounds)


def tree_reduce(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """The tree broadcast run backwards: sums travel to rank 0 in ceil(log2 N) rounds."""
    down = tree_broadcast(rank, world_size, numel)
    return tuple(
        Round(turn.receives, turn.sends, "add", complete=rank == 0 and turn is down[0]) for turn in reversed(down)
    )


PLANS: dict[str, Plan] = {
    "all_reduce": direct_all_reduce,
    "reduce_scatter": direct_reduce_scatter,
    "all_gather": direct_all_gather,
    "reduce": server_reduce,
    "broadcast": server_broadcast,
    "tree_broadcast": tree_broadcast,
    "tree_reduce": tree_reduce,
    "ring_all_reduce": ring_all_reduce,
}
"""The plan of each collective, by the name that an `Op` gives it."""


@cache
def traffic(collective: str, rank: int, world_size: int, numel: int) -> Traffic:
    """Elements that `rank` sends and receives in one collective over `numel` elements.

    Raises:
        KeyError: There is no such collective.
    """
    rounds = PLANS[collective](rank, world_size, numel)
    return Traffic(
        sum(part.stop - part.start for turn in rounds for part in turn.sends),
        sum(part.stop - part.start for turn in rounds for part in turn.receives),
    )


def seconds(collective: str, world_size: int, numel: int, bandwidth: float, latency: float = 0.0) -> float:
    """Alpha-beta time of a collective: in each round, the latency and the most that any rank sends or receives.

    Args:
        collective: Key of `PLANS`.
        world_size: Number of ranks.
        numel: Elements (or bytes).
        bandwidth: Elements (or bytes) a second that a rank can send, and receive at the same time.
        latency: Seconds per round.
    """
    per_rank = [PLANS[collective](rank, world_size, numel) for rank in range(world_size)]
    total = 0.0
    for turns in zip(*per_rank, strict=True):
        sizes = [
            sum(part.stop - part.start for part in parts) for turn in turns for parts in (turn.sends, turn.receives)
        ]
        total += latency + max(sizes, default=0) / bandwidth
    return total
