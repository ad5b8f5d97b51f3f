import pytest

from paceline.core.strategy import Strategy
from paceline.plan.recomputed import recomputed_units

UNITS = ("embed", "blocks.0", "blocks.1", "head")


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Strategy(), set()),
        (Strategy(recompute="unit"), {"blocks.0", "blocks.1"}),
        (Strategy(recompute="unit", recompute_every=2), {"blocks.1"}),
        (Strategy(recompute="unit", units=("*ed",)), {"embed"}),
    ],
)
def test_every_kth_repeated_unit_is_recomputed(strategy: Strategy, expected: set[str]) -> None:
    assert recomputed_units(UNITS, strategy) == expected
