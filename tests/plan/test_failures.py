from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.failures import Failures, failures, saving_seconds


def test_young_and_daly_worked_by_hand() -> None:
    """Saving 2 minutes, a failure a day: sqrt(2 x 120 x 86,400) = 4,554 s; Daly takes the saving off again."""
    found = failures(86400.0, 120.0, 0.0)
    assert found.young == pytest.approx(4553.7, abs=0.1)
    share = math.sqrt(120 / (2 * 86400))
    assert found.interval == pytest.approx(4553.7 * (1 + share / 3 + share**2 / 9) - 120, abs=0.1)
    assert found.goodput == pytest.approx(1 - 120 / 4553.7 - 4553.7 / 2 / 86400, abs=0.003)


def goodput(interval: float, of: Failures) -> float:
    takes = of.between * math.exp(of.restarting / of.between) * math.expm1((interval + of.saving) / of.between)
    return interval / takes


@given(st.floats(600, 1e7), st.floats(1, 300), st.floats(0, 600))
def test_no_other_interval_is_much_better(between: float, saving: float, restarting: float) -> None:
    found = failures(between, saving, restarting)
    others = [goodput(found.interval * factor, found) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)]
    assert 0 < found.goodput <= 1 and max(others) <= found.goodput * 1.01


def test_what_cannot_go_on_is_told_as_such() -> None:
    assert failures(1.0, 1000.0, 3600.0).goodput == 0
    # Once in hundreds of thousands of years a step of work would stay.
    hopeless = failures(3.6, 48.2, 120.0)
    assert hopeless.goodput == 0 and "this does not get on" in hopeless.in_words
    assert "before what was done is saved, which takes 48.2 seconds" in failures(3.6, 48.2, 1.0).in_words
    # A ten-thousandth of the time, or less, is no use.
    rare = failures(36.0, 48.2, 400.0)
    assert rare.goodput == 0 and "this does not get on" in rare.in_words
    slow = failures(86400.0, 48.2, 1e9)
    assert slow.goodput == 0 and "before work goes on again, which takes 11,574 days" in slow.in_words
    assert failures(3600.0, 0.0, 0.0).goodput > 0.99


def test_saving_takes_what_all_hosts_write_at_once() -> None:
    assert saving_seconds(70 * 10**9, 128) == pytest.approx(12 * 70e9 / (128 * 2e9))
