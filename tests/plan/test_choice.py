from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.strategy import Strategy
from paceline.models.presets import PRESETS
from paceline.plan import profiles
from paceline.plan.case import Case
from paceline.plan.choice import ALIKE, preferred
from paceline.plan.estimate import Estimate
from paceline.plan.recommend import reason
from paceline.plan.search import search
from paceline.plan.subject import transformer


def taken(*forecasts: tuple[float, Strategy]) -> Strategy:
    return preferred(forecasts, lambda each: each[0], lambda each: each[1])[1]


@pytest.mark.parametrize("order", [1, -1])
def test_of_those_alike_the_one_that_shares_and_recomputes_least_is_taken(order: int) -> None:
    zero = [Strategy(zero=stage) for stage in (0, 1, 2, 3)]
    forecasts = [(1.001, zero[0]), (1.0, zero[1]), (1.0, zero[2]), (1.02, zero[3])]
    assert taken(*forecasts[::order]) == zero[0]
    # One that is slower by more than forecasts can be trusted with is not.
    slower = [(1 + 1.01 * ALIKE, zero[0]), *forecasts[1:]]
    assert taken(*slower[::order]) == zero[1]
    again = replace(zero[0], recompute="unit")
    assert taken(*[(1.0, again), (1.001, zero[0])][::order]) == zero[0]


def test_what_is_recommended_is_so_and_its_reason_says_it() -> None:
    found = search(Case(transformer("gpt2-124m", PRESETS["gpt2-124m"]), profiles.hardware("h100"), 8), 64)
    by_stage = {each.setting.strategy.stage: each for each in found.best}
    nearly = replace(found, best=(by_stage[3], _lasting(by_stage[0], 1.002 * by_stage[3].seconds)))
    assert nearly.recommended is nearly.best[1]
    assert reason(nearly).startswith("within 0.5 % of the fastest of the 2 strategies that fit, and of those the one")
    apart = replace(found, best=(by_stage[3], _lasting(by_stage[0], 1.01 * by_stage[3].seconds)))
    assert apart.recommended is apart.best[0] and reason(apart).startswith("the fastest of the 2 strategies that fit")


def _lasting(estimate: Estimate, seconds: float) -> Estimate:
    return replace(estimate, compute=seconds, exposed={}, optimizer=0.0, bubble=0.0)
