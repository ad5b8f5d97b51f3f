"""Proves that every two ops that may not run at once are in order, however long each of them takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import combinations_with_replacement
from operator import or_

from paceline.core.check.report import Fault, within, words
from paceline.core.check.sequences import STEPS, Sequences
from paceline.core.check.spans import Accesses, Area
from paceline.core.ops import STATISTICS, Key, Op


def happens_before(ops: Sequence[Op], sequences: Sequences) -> list[int]:
    """For each op of two steps, itself and the ops that are over when it starts, as the bits of a number.

    An op starts when those before it on its stream, those that it comes after, and the compute ops of the step before
    are over.
    """
    found: dict[tuple[int, Key], int] = {}
    latest: dict[str, int] = {}
    masks: list[int] = []
    fence = 0
    for step in range(STEPS):
        for op in ops:
            mask = 1 << len(masks) | fence | latest.get(op.stream, 0)
            for key in op.after:
                wanted = sequences.before(key, step)
                if wanted[0] >= 0:
                    mask |= masks[found[wanted]]
            found[step, op.key] = len(masks)
            latest[op.stream] = mask
            masks.append(mask)
        fence = latest.get("compute", 0)
    return masks


def races(rank: int, ops: Sequence[Op], touched: Accesses, masks: Sequence[int]) -> tuple[int, list[Fault]]:
    """Pairs of ops on one part of a buffer, one of which writes, and those of them that are not in order.

    Of each part only the latest write and the reads since then are compared: what is before these is before all that
    follows them.
    """
    written = {name: [-1] * count for name, count in touched.partition.parts()}
    read = {name: [0] * count for name, count in touched.partition.parts()}
    pairs, faults = 0, dict[tuple[int, int], Fault]()

    def conflict(earlier: int, later: int, area: Area, how: tuple[str, str]) -> None:
        if (earlier, later) not in faults:
            faults[earlier, later] = _race(rank, ops, earlier, later, touched, area, how)

    for node, before in enumerate(masks):
        position, bit = node % len(ops), 1 << node
        for area in touched.reads[position]:
            name, first, stop = area
            for writer in set(written[name][first:stop]):
                if writer >= 0:
                    pairs += 1
                    if not before >> writer & 1:
                        conflict(writer, node, area, ("read", "written"))
            readers = read[name]
            for part in range(first, stop):
                readers[part] |= bit
        for area in touched.writes[position]:
            name, first, stop = area
            for writer in set(written[name][first:stop]):
                if writer >= 0:
                    pairs += 1
                    if not before >> writer & 1:
                        conflict(writer, node, area, ("overwrite", "written"))
            since = reduce(or_, read[name][first:stop]) & ~bit
            pairs += since.bit_count()
            for reader in _bits(since & ~before):
                conflict(reader, node, area, ("overwrite", "read"))
            written[name][first:stop] = [node] * (stop - first)
            read[name][first:stop] = [0] * (stop - first)
    return pairs, list(faults.values())


def _race(
    rank: int, ops: Sequence[Op], earlier: int, later: int, touched: Accesses, area: Area, how: tuple[str, str]
) -> Fault:
    (step, first), (next_step, second) = divmod(earlier, len(ops)), divmod(later, len(ops))
    span = touched.partition.span(area)
    return Fault(
        *("race", rank, ops[second].key),
        f"{words(ops[second])}{within(next_step)} may {how[0]} [{span.start:,}, {span.stop:,}) of buffer "
        f"{span.buffer!r} before it is {how[1]} by {words(ops[first])}{within(step)}: nothing lets it come after that",
    )


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def shared_races(
    ranks: Sequence[int],
    steps: Sequence[tuple[Op, ...]],
    touched: Mapping[int, Accesses],
    masks: Mapping[int, Sequence[int]],
    shared: frozenset[str],
    agree: bool,
) -> Iterator[Fault]:
    """The same for buffers that the ranks of a group share, between every two of them.

    Ranks see each other's progress where they meet alone: what comes before that on some rank is over when what comes
    after it on another starts. They meet in barriers and, where that is enough (`agree`), in the sum of statistics.
    """
    # What stands between the same meetings: which ranks read and which write each part, and an op for each rank.
    classes: dict[tuple[int, int], _Class] = defaultdict(_Class)
    numbers: dict[tuple[int, Key], int] = {}
    for rank in ranks:
        ops = steps[rank]
        meetings = {
            numbers.setdefault((step, op.key), len(numbers)): step * len(ops) + i
            for step in range(STEPS)
            for i, op in enumerate(ops)
            if op.kind == "barrier" or (agree and (op.kind, op.target) == ("all_reduce", STATISTICS))
        }
        for node, mask in enumerate(masks[rank]):
            areas = [
                (area, writes)
                for writes, side in ((False, touched[rank].reads), (True, touched[rank].writes))
                for area in side[node % len(ops)]
                if area[0] in shared
            ]
            if areas:
                over = sum(1 << number for number, meeting in meetings.items() if mask >> meeting & 1)
                ahead = sum(1 << number for number, meeting in meetings.items() if masks[rank][meeting] >> node & 1)
                for area, writes in areas:
                    classes[over, ahead].add(rank, node, area, writes)
    for ((over, ahead), mine), ((other_over, other_ahead), others) in combinations_with_replacement(classes.items(), 2):
        if not (ahead & other_over or other_ahead & over):
            yield from _between(mine, others, steps)
            if others is not mine:
                yield from _between(others, mine, steps)


class _Class:
    """The ranks that read and write the parts of shared buffers between two meetings."""

    def __init__(self) -> None:
        self.writes: dict[tuple[str, int], int] = defaultdict(int)
        self.touches: dict[tuple[str, int], int] = defaultdict(int)
        self._accesses: list[tuple[int, int, Area, bool]] = []

    def add(self, rank: int, node: int, area: Area, writes: bool) -> None:
        name, first, stop = area
        self._accesses.append((rank, node, area, writes))
        for part in range(first, stop):
            self.touches[name, part] |= 1 << rank
            if writes:
                self.writes[name, part] |= 1 << rank

    def node(self, rank: int, place: tuple[str, int], writes: bool) -> int:
        """An op of a rank that touches a part, or writes it."""
        name, part = place
        return next(
            node
            for found, node, (buffer, first, stop), wrote in self._accesses
            if found == rank and buffer == name and first <= part < stop and wrote >= writes
        )


def _between(writing: _Class, other: _Class, steps: Sequence[tuple[Op, ...]]) -> Iterator[Fault]:
    for place, writers in writing.writes.items():
        touching = other.touches.get(place, 0)
        if touching and (writers | touching).bit_count() > 1:
            writer, user = next((w, u) for w in _bits(writers) for u in _bits(touching) if w != u)
            step, position = divmod(writing.node(writer, place, True), len(steps[writer]))
            other_step, other_position = divmod(other.node(user, place, False), len(steps[user]))
            op, victim = steps[writer][position], steps[user][other_position]
            yield Fault(
                *("race", writer, op.key),
                f"{words(op)}{within(step)} may write buffer {place[0]!r}, which ranks share, while {words(victim)}"
                f"{within(other_step)} of rank {user} uses it: no barrier keeps them apart",
            )
            return
