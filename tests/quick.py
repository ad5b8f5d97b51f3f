"""Which cases of a test the quick run takes, where there are many alike."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import settings


def named_values(axis: Mapping[str, object] | Iterable[object]) -> dict[str, object]:
    """An axis's values by the names that they have in tests' ids."""
    return dict(axis) if isinstance(axis, Mapping) else {str(value): value for value in axis}


def diagonal(
    *axes: Mapping[str, object] | Iterable[object], quick: Container[tuple[str, ...]] | None = None
) -> list[Any]:
    """All combinations of the axes' values, for `pytest.mark.parametrize`.

    The quick run takes those on the diagonal, in which every value of every axis is met, or those that `quick` names;
    the others are marked `full`.
    """
    named = [named_values(axis) for axis in axes]
    orders = [list(axis) for axis in named]
    if quick is None:
        quick = {tuple(order[index % len(order)] for order in orders) for index in range(max(map(len, orders)))}
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(named, names, strict=True)),
            marks=() if names in quick else pytest.mark.full,
            id="-".join(names),
        )
        for names in product(*orders)
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
