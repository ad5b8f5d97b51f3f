from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.published.errors import constant_utilisation, errors, in_order


@given(st.lists(st.floats(-0.9, 5), min_size=1, max_size=40))
def test_figures_are_those_of_numpy(values: list[float]) -> None:
    found = errors(values)
    assert found is not None
    sizes = np.abs(values)
    figures = (found.mean, found.median, found.p90, found.worst)
    assert figures == pytest.approx((sizes.mean(), np.median(sizes), np.quantile(sizes, 0.9), sizes.max()))


def test_of_no_rows_there_are_none() -> None:
    assert errors([]) is None


def test_one_utilisation_is_that_of_the_others() -> None:
    # 50, 50 and 25 % of the peak; the fourth is alone of its kind.
    assert constant_utilisation([2, 2, 4, 1], [1, 1, 1, 1], ["a", "a", "a", "b"]) == pytest.approx(
        [1 / 0.375 / 2 - 1, 1 / 0.375 / 2 - 1, 1 / 0.5 / 4 - 1]
    )


def test_pairs_that_measure_alike_have_no_order() -> None:
    assert in_order([1.0, 1.01, 2.0], [1.0, 0.5, 3.0]) == (2, 2)
    assert in_order([1.0, 2.0], [2.0, 1.0]) == (0, 1)
