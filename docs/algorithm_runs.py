"""Collectives run without ranks, on anything that can be added: numbers, or whose elements a cell holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.core.collectives.rounds import Algorithm, Round, chunk


class Move(NamedTuple):
    """One element on its way: from a place in the giver's buffer to a place in the taker's."""

    giver: int
    source: int
    taker: int
    target: int
    adds: bool


@dataclass(frozen=True)
class Held:
    """What is in a place of a buffer: the elements of which ranks, added up, and of which shard."""

    shard: int
    ranks: frozenset[int]


def rounds(algorithm: Algorithm, ranks: int, numel: int) -> list[tuple[Round, ...]]:
    """For each round, every rank's part in it."""
    return list(zip(*(algorithm(rank, ranks, numel) for rank in range(ranks)), strict=True))


def moves(turns: Sequence[Round], numel: int) -> Iterator[Move]:
    """The elements that travel in one round."""
    for rank, turn in enumerate(turns):
        for peer, start, stop in turn.receives:
            first = chunk(rank, len(turns), numel)[0] if turn.transposed else start
            for offset in range(stop - start):
                yield Move(peer, first + offset, rank, start + offset, turn.combine == "add")


def run(
    algorithm: Algorithm, buffers: Sequence[Sequence[Any]], add: Callable[[Any, Any], Any], always: bool = False
) -> list[list[list[Any]]]:
    """What every rank's buffer holds before the first round and after each.

    Args:
        algorithm: The algorithm.
        buffers: What each rank begins with.
        add: Gives the sum of what is held and what arrives.
        always: Whether to add where the algorithm replaces.
    """
    numel = len(buffers[0])
    states = [[list(buffer) for buffer in buffers]]
    for turns in rounds(algorithm, len(buffers), numel):
        before, after = states[-1], [list(buffer) for buffer in states[-1]]
        for giver, source, taker, target, adds in moves(turns, numel):
            arrives = before[giver][source]
            after[taker][target] = add(after[taker][target], arrives) if adds or always else arrives
        states.append(after)
    return states


def holdings(collective: str, algorithm: Algorithm, ranks: int, numel: int) -> list[list[list[Held | None]]]:
    """What every place of every rank's buffer holds, from before the first round on; None where nothing came yet.

    Of a barrier: who is known to have come.
    """

    def given(rank: int, place: int) -> Held | None:
        if collective in ("broadcast", "scatter"):
            begins = rank == 0
        else:
            begins = rank == place or collective not in ("gather", "all_gather")
        return Held(place, frozenset({rank})) if begins else None

    def add(first: Held, second: Held) -> Held:
        return Held(first.shard, first.ranks | second.ranks)

    buffers = [[given(rank, place) for place in range(numel)] for rank in range(ranks)]
    return run(algorithm, buffers, add, always=collective == "barrier")


def needs(collective: str, algorithm: Algorithm, ranks: int, numel: int) -> list[list[list[bool]]]:
    """Whether what a place holds still serves the result, from before the first round on."""
    own = collective in ("scatter", "reduce_scatter")
    last = 1 if collective in ("reduce", "gather") else ranks
    needed = [[[rank < last and (not own or rank == place) for place in range(numel)] for rank in range(ranks)]]
    for turns in reversed(rounds(algorithm, ranks, numel)):
        after, before = needed[0], [list(buffer) for buffer in needed[0]]
        found = list(moves(turns, numel))
        for move in found:
            before[move.taker][move.target] &= move.adds or collective == "barrier"
        for move in found:
            before[move.giver][move.source] |= after[move.taker][move.target]
        needed.insert(0, before)
    return needed
