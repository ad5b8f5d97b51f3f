"""What is left out of products of settings: no pair of any two."""

from __future__ import annotations

from itertools import combinations, product

from tests.quick import pairwise


def pairs(cases: list[tuple[object, ...]]) -> set[object]:
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


def test_all_pairs_that_there_are_are_met_by_few_cases() -> None:
    every = [case for case in product(range(4), "abc", (True, False), "xyz") if case[:2] != (0, "a")]
    chosen = pairwise(every)
    assert pairs(chosen) == pairs(every) and set(chosen) <= set(every)
    assert len(chosen) == len(set(chosen)) <= 12 < len(every)


def test_of_two_axes_all_are_taken_and_what_is_there_at_any_rate_comes_first() -> None:
    every = list(product("ab", range(3)))
    assert sorted(pairwise(every)) == every
    assert pairwise(every, first=[("b", 2)])[0] == ("b", 2) and len(pairwise(every, first=[("b", 2)])) == 6
