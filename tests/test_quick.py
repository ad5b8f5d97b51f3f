"""What is left out of products of settings: no pair of any two."""

from __future__ import annotations

from itertools import combinations, product

from tests.quick import fewest, in_turn, pairwise


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


def test_in_turn_each_has_as_many_and_what_quick_names_is_there() -> None:
    cases = in_turn("abcd", {"x": 1, "y": 2, "z": 3}, times=2, quick={("a", "z")})
    assert [case.id for case in cases] == ["a-x", "a-y", "a-z", "b-x", "b-z", "c-y", "c-z", "d-x", "d-y"]
    assert [case.id for case in cases if not case.marks] == ["a-z"]
    assert [case.values for case in cases[:3]] == [("a", 1), ("a", 2), ("a", 3)]


def test_fewest_meets_what_any_case_meets() -> None:
    every = list(product(range(3), range(6)))
    chosen = fewest(every, lambda case: enumerate(case), first=[(2, 5)])
    assert chosen[0] == (2, 5) and len(chosen) == 6
    assert {part for case in chosen for part in enumerate(case)} == {part for case in every for part in enumerate(case)}
