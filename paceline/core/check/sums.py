"""Sums of what ranks contribute, each known by a number. A symbol stands for what a micro-batch's backward gives."""

from __future__ import annotations

from collections.abc import Sequence

Term = tuple[int, int, int]
"""Step, rank and micro-batch of a contribution."""


class Sums:
    """Linear combinations of contributions, equal ones under one number."""

    def __init__(self) -> None:
        """Knows none yet."""
        self._terms: list[dict[Term, float]] = []
        self._numbers: dict[frozenset[tuple[Term, float]], int] = {}
        self._made: dict[tuple[tuple[int, ...], float], int] = {}
        self._common: dict[tuple[int, ...], str | None] = {}
        self._everyones: dict[tuple[int, int, range, float], int] = {}

    def number(self, terms: dict[Term, float]) -> int:
        """The number of a sum, given the factor of each contribution."""
        name = frozenset(terms.items())
        if name not in self._numbers:
            self._numbers[name] = len(self._terms)
            self._terms.append(terms)
        return self._numbers[name]

    def everyones(self, step: int, ranks: int, micro_batches: range, factor: float = 1.0) -> int:
        """The number of the sum of what all ranks contribute in some micro-batches, which each of them asks for."""
        name = step, ranks, micro_batches, factor
        if name not in self._everyones:
            self._everyones[name] = self.number(
                {(step, rank, index): factor for rank in range(ranks) for index in micro_batches}
            )
        return self._everyones[name]

    def add(self, numbers: Sequence[int], scale: float = 1.0) -> int:
        """The number of the sum of some sums, times a factor."""
        name = (tuple(numbers), scale)
        if name not in self._made:
            total: dict[Term, float] = {}
            for number in numbers:
                for term, factor in self._terms[number].items():
                    total[term] = total.get(term, 0.0) + factor * scale
            self._made[name] = self.number(total)
        return self._made[name]

    def counted_twice(self, numbers: Sequence[int]) -> str | None:
        """A contribution that more than one of some sums has, in words; None if there is none."""
        name = tuple(numbers)
        if name not in self._common:
            seen: set[Term] = set()
            self._common[name] = None
            for number in name:
                if both := seen & self._terms[number].keys():
                    self._common[name] = _named(min(both))
                    break
                seen.update(self._terms[number])
        return self._common[name]

    def difference(self, number: int, wanted: int) -> str:
        """Returns the first difference of a sum from the wanted one, in words."""
        found, expected = self._terms[number], self._terms[wanted]
        for term in expected:
            if term not in found:
                return f"the contribution of {_named(term)} is missing"
        for term in found:
            if term not in expected:
                return f"the contribution of {_named(term)} does not belong there"
        term = next(term for term in expected if found[term] != expected[term])
        return f"the contribution of {_named(term)} counts {found[term]:g} times, not {expected[term]:g}"


def _named(term: Term) -> str:
    step, rank, micro_batch = term
    return f"rank {rank} in micro-batch {micro_batch}{' of the next step' if step else ''}"
