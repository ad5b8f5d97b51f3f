"""Which cases of a test are run, and which of these the quick run takes, where there are many alike."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import settings


def named_values(axis: Mapping[str, object] | Iterable[object]) -> dict[str, object]:
    """An axis's values by the names that they have in tests' ids."""
    return dict(axis) if isinstance(axis, Mapping) else {str(value): value for value in axis}


def fewest(
    cases: Iterable[tuple[Hashable, ...]],
    met_in: Callable[[tuple[Any, ...]], Iterable[Hashable]],
    first: Iterable[tuple[Hashable, ...]] = (),
) -> list[tuple[Any, ...]]:
    """Few of the cases, in which all is met that is met in any case.

    After those that are to be there at any rate, each time the case is taken in which most is met that no other had, of
    several the first.
    """
    taken = list(first)
    met = {each for case in taken for each in met_in(case)}
    every = [(case, frozenset(met_in(case))) for case in cases]
    # How much a case adds only becomes less: what comes first with a number that still holds has most.
    left = [(-len(new - met), index) for index, (_, new) in enumerate(every)]
    heapify(left)
    while left and left[0][0] < 0:
        adds, index = left[0]
        case, new = every[index]
        if (now := -len(new - met)) > adds:
            heapreplace(left, (now, index))
        else:
            heappop(left)
            taken.append(case)
            met |= new
    return taken


def pairwise(
    cases: Iterable[tuple[Hashable, ...]], first: Iterable[tuple[Hashable, ...]] = ()
) -> list[tuple[Any, ...]]:
    """The fewest cases in which all pairs of values of two axes are met.

    For settings of which each may disturb another one, where all together are checked by other means.
    """
    return fewest(cases, lambda case: combinations(enumerate(case), 2), first)


def diagonal(
    *axes: Mapping[str, object] | Iterable[object], quick: Container[tuple[str, ...]] | None = None
) -> list[Any]:
    """Combinations of the axes' values in which all pairs are met, for `pytest.mark.parametrize`.

    The quick run takes those on the diagonal, in which every value of every axis is met, or those that `quick` names;
    the others are marked `full`.
    """
    named = [named_values(axis) for axis in axes]
    orders = [list(axis) for axis in named]
    if quick is None:
        quick = {tuple(order[index % len(order)] for order in orders) for index in range(max(map(len, orders)))}
    every = list(product(*orders))
    chosen = set(pairwise(every, first=[names for names in every if names in quick]))
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(named, names, strict=True)),
            marks=() if names in quick else pytest.mark.full,
            id="-".join(names),
        )
        for names in every
        if names in chosen
    ]


def in_turn(
    values: Mapping[str, object] | Iterable[object],
    others: Mapping[str, object] | Iterable[object],
    times: int,
    quick: Container[tuple[str, str]],
) -> list[Any]:
    """Each value with so many of the others, the next with those that follow, for `pytest.mark.parametrize`.

    Those that `quick` names are there at any rate, and are what the quick run takes.
    """
    values, others = named_values(values), named_values(others)
    order = list(others)
    turns = {
        (value, order[(index * times + turn) % len(order)])
        for index, value in enumerate(values)
        for turn in range(times)
    }
    return [
        pytest.param(
            values[value],
            others[other],
            marks=() if (value, other) in quick else pytest.mark.full,
            id=f"{value}-{other}",
        )
        for value in values
        for other in others
        if (value, other) in turns or (value, other) in quick
    ]


def full(*values: object) -> Any:
    """A case of `pytest.mark.parametrize` that the quick run leaves out."""
    return pytest.param(*values, marks=pytest.mark.full)


def some(names: Iterable[str], quick: Container[str]) -> list[Any]:
    """Cases of `pytest.mark.parametrize`, of which the quick run takes some."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.full, id=name) for name in names]


def examples(number: int) -> int:
    """How many examples hypothesis draws for a test: `number` in a full run, a part of it in the quick one."""
    return number * settings.default.max_examples // settings.get_profile("full").max_examples
