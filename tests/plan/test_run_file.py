"""What a configuration asks for that is not forecast is said, and not forecast as something else."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.models.presets import PRESETS
from paceline.plan import profiles
from paceline.plan.case import Case
from paceline.plan.estimate import Setting
from paceline.plan.run_file import estimate_of
from paceline.plan.subject import transformer


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Strategy(zero=1, share_parameters=True), "strategy.share_parameters: GPUs have memory of their own each"),
        (Strategy(wire="int8"), "strategy.wire=int8 is not forecast"),
    ],
)
def test_it_is_refused(strategy: Strategy, said: Any) -> None:
    case = Case(transformer("small", PRESETS["small"]), profiles.hardware("a100"), 8)
    with pytest.raises(UserError, match=said):
        estimate_of(Setting(strategy, 1, 1), case, 8)
    assert estimate_of(Setting(Strategy(zero=1), 1, 1), case, 8).seconds > 0
