"""The rounds of a collective: who sends which elements to whom, and when.

An algorithm is a pure function that gives them. The CPU transports execute it, `Schedule` reads its bytes from it, the
documentation draws it, and the tests hold it against the textbook's numbers, so the cost that is predicted is the cost
of what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Combine = Literal["add", "replace"]


class Transfer(NamedTuple):
    """Elements [start, stop) of a buffer that are sent to `peer`, or received from it."""

    peer: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's part in one round: everything in a round may be in flight at once.

    With `combine="add"` what is received for a range is summed with the rank's own elements, in the order of the
    ranks; with "replace" it takes their place. What is sent is what the buffer held when the round began.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    combine: Combine
    complete: bool = False
    """With "add": the sums of this round contain every rank's elements, so a mean may be taken of them."""
    transposed: bool = False
    """Whether what comes from a peer lies in its buffer at the place of this rank's chunk (an all-to-all), not at the
    same place as here."""


class Traffic(NamedTuple):
    """Bytes (or elements) that one rank sent and received."""

    sent: int
    received: int


Algorithm = Callable[[int, int, int], tuple[Round, ...]]
"""(rank, world size, elements) -> this rank's rounds, as many as every other rank's."""


def chunk(index: int, world_size: int, numel: int) -> tuple[int, int]:
    """Range of the `index`-th of `world_size` contiguous chunks, sizes differing by at most one element."""
    return numel * index // world_size, numel * (index + 1) // world_size


def chunks(first: int, count: int, world_size: int, numel: int) -> tuple[tuple[int, int], ...]:
    """The ranges that `count` neighbouring chunks cover, the first following the last: one range, or two."""
    last = first + count
    spans = [(first, last)] if last <= world_size else [(first, world_size), (0, last - world_size)]
    return tuple((chunk(a, world_size, numel)[0], chunk(b - 1, world_size, numel)[1]) for a, b in spans if b > a)


def in_sequence(*algorithms: Algorithm) -> Algorithm:
    """The algorithms one after another."""

    def algorithm(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
        return tuple(round_ for each in algorithms for round_ in each(rank, world_size, numel))

    return algorithm


def reverse(algorithm: Algorithm, combine: Combine, root_alone: bool = False) -> Algorithm:
    """The algorithm run from its last round to its first, every transfer going the other way.

    What carries a value from one rank to all collects, run backwards and adding, all ranks' values at that one: a
    broadcast becomes a reduce, an all-gather a reduce-scatter. With "replace" a scatter becomes a gather.

    Args:
        algorithm: The algorithm.
        combine: What is done with what arrives.
        root_alone: Only rank 0 ends with whole sums.
    """

    def reversed_algorithm(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
        rounds = algorithm(rank, world_size, numel)[::-1]
        adding = [index for index, round_ in enumerate(rounds) if round_.sends]
        whole = adding[-1] if adding and combine == "add" and not (root_alone and rank) else None
        return tuple(
            Round(round_.receives, round_.sends, combine, complete=index == whole)
            for index, round_ in enumerate(rounds)
        )

    return reversed_algorithm


def with_root(algorithm: Algorithm, root: int) -> Algorithm:
    """The algorithm with its root at another rank than 0: all ranks move up, around the ring.

    Args:
        algorithm: Has its root at rank 0, and exchanges whole chunks.
        root: The rank that plays rank 0's part; 0 leaves the algorithm as it is.
    """
    if not root:
        return algorithm

    def rotated(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
        def moved(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
            return tuple(
                Transfer((transfer.peer + root) % world_size, *span)
                for transfer in transfers
                for span in spans(transfer.start, transfer.numel)
            )

        def spans(first: int, count: int) -> tuple[tuple[int, int], ...]:
            if count == world_size:
                return ((0, numel),)
            return chunks((first + root) % world_size, count, world_size, numel)

        # With one element a chunk, ranges count chunks, whose sizes differ between the ranks that swap roles.
        rounds = algorithm((rank - root) % world_size, world_size, world_size)
        return tuple(replace(round_, sends=moved(round_.sends), receives=moved(round_.receives)) for round_ in rounds)

    return rotated


def traffic_of(algorithm: Algorithm, rank: int, world_size: int, numel: int) -> Traffic:
    """Elements that `rank` sends and receives in all rounds of an algorithm."""
    rounds = algorithm(rank, world_size, numel)
    return Traffic(
        sum(transfer.numel for round_ in rounds for transfer in round_.sends),
        sum(transfer.numel for round_ in rounds for transfer in round_.receives),
    )


def fuses(first: Round, second: Round, peers: Collection[int]) -> bool:
    """Whether ranks that reach each other's memory can do two rounds at once: write what they sum straight to peers.

    So it is where all `peers` give a rank the same range to sum, and take the sum in the next round.
    """
    spans = {transfer[1:] for transfer in first.receives}
    return (
        first.combine == "add"
        and first.complete
        and second.combine == "replace"
        and len(spans) == 1
        and {transfer[1:] for transfer in second.sends} == spans
        and all(
            {transfer.peer for transfer in transfers} == set(peers)
            for transfers in (first.sends, first.receives, second.sends)
        )
        and set(first.sends) == set(second.receives)
    )


def overwrites(round_: Round) -> bool:
    """Whether a rank receives in a round where peers still read what it sends.

    What arrives must then wait in scratch memory until they have read it.
    """
    return any(
        sent.start < received.stop and received.start < sent.stop
        for sent in round_.sends
        for received in round_.receives
        if sent.numel and received.numel
    )


def alpha_beta_seconds(
    algorithm: Algorithm, world_size: int, numel: int, bandwidth: float, latency: float = 0.0
) -> float:
    """Alpha-beta time of an algorithm: in each round, the latency and the most that any rank sends or receives.

    Args:
        algorithm: The algorithm.
        world_size: Number of ranks.
        numel: Elements (or bytes).
        bandwidth: Elements (or bytes) a second that a rank can send, and receive at the same time.
        latency: Seconds per round.
    """
    per_rank = [algorithm(rank, world_size, numel) for rank in range(world_size)]
    total = 0.0
    for rounds in zip(*per_rank, strict=True):
        sizes = [
            sum(transfer.numel for transfer in transfers)
            for round_ in rounds
            for transfers in (round_.sends, round_.receives)
        ]
        total += latency + max(sizes, default=0) / bandwidth
    return total
