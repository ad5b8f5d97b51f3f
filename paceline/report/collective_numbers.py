"""Collectives over several ranks in numbers, round by round: what each rank's chunks hold as sums go around. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.collectives.algorithms import find_algorithm
from paceline.core.collectives.rounds import Round
from paceline.report.teaching import Frame


@dataclass(frozen=True)
class Example:
    """Ranks that add up what they have.

    Attributes:
        algorithm: How, as `find_algorithm` calls it.
        values: Of each rank, a number for each chunk.
    """

    algorithm: str
    values: tuple[tuple[float, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the chunks."""
        return tuple(f"chunk {index}" for index in range(len(self.values[0])))


_DIGITS = tuple((10.0**rank,) * 4 for rank in range(4))
"""Of four ranks: the digits of a sum say whose numbers are in it."""
EXAMPLES = {
    "a ring's all-reduce, 4 ranks and 4 chunks": Example("all_reduce/ring", _DIGITS),
    "a tree's all-reduce, 4 ranks and 4 chunks": Example("all_reduce/tree", _DIGITS),
    "a ring's reduce-scatter, 4 ranks and 4 chunks": Example("reduce_scatter/ring", _DIGITS),
    "a tree's reduce, 8 ranks": Example(
        "reduce/tree", tuple((value,) for value in (0.1, -0.2, -0.3, 0.5, -0.6, -0.1, 0.2, 0.3))
    ),
}
"""By what a reader chooses; the last one adds up to -0.1 on rank 0, in 3 rounds."""


def collective_frames(example: Example) -> list[Frame]:
    """The collective, moment by moment: before it, and after each round."""
    now = [list(values) for values in example.values]
    ranks, chunks = len(now), len(now[0])
    algorithm = find_algorithm(example.algorithm)
    per_rank = [algorithm(rank, ranks, chunks) for rank in range(ranks)]
    found = [_frame("Before the collective each rank has its own numbers.", now)]
    rounds = list(zip(*per_rank, strict=True))
    for number, each in enumerate(rounds, start=1):
        sent = _exchange(each, now)
        does = "adds it up" if any(r.combine == "add" and r.receives for r in each) else "keeps it"
        told = ", ".join(f"rank {a} sends rank {b} {', '.join(what)}" for a, b, what in sent)
        found.append(_frame(f"Round {number} of {len(rounds)}: {told}; who receives {does}.", now, sent))
    return found


def _exchange(rounds: Sequence[Round], now: list[list[float]]) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """Does a round; gives from which rank to which went which chunks."""
    before = [list(values) for values in now]
    for rank, round_ in enumerate(rounds):
        for transfer in round_.receives:
            for chunk in range(transfer.start, transfer.stop):
                came = before[transfer.peer][chunk]
                now[rank][chunk] = now[rank][chunk] + came if round_.combine == "add" else came
    return tuple(
        (rank, sent.peer, tuple(f"chunk {chunk}" for chunk in range(sent.start, sent.stop)))
        for rank, round_ in enumerate(rounds)
        for sent in round_.sends
    )


def _frame(
    told: str, now: Sequence[Sequence[float]], moved: tuple[tuple[int, int, tuple[str, ...]], ...] = ()
) -> Frame:
    # Sums of decimal numbers are shown without what binary ones add to them.
    return Frame(told, tuple({"holds": tuple(round(value, 9) for value in values)} for values in now), moved)
