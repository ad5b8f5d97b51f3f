"""Models that raise, or never end, where a condition that depends on values is taken to hold."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from paceline.core.errors import UserError
from paceline.plan import observed_pass
from paceline.plan.trace import trace
from tests.plan.test_likely_values import LABELS, SAMPLES, TOKENS, WIDTH, X


class Checks(nn.Module):
    """Raises where labels are too many, and computes again until nothing changes, which nobody can tell when."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= 6:
            raise ValueError("too many")
        y = self.body(x)
        while y.abs().max() > 1e9:
            y = y / 2
        return y


def test_where_a_condition_ends_a_model_it_is_taken_not_to_hold() -> None:
    work = trace(Checks(), SAMPLES, inputs=(X, LABELS))
    (told,) = work.warnings
    assert told.endswith("conditions not to hold, as it could not run with them, whatever is left out by that")
    assert work.flops == 2 * 2 * SAMPLES * TOKENS * WIDTH * WIDTH


def test_a_loop_that_ends_by_values_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed_pass, "_MOST_ASKED", 50)

    class Endless(Checks):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            y = self.body(x)
            while not y.abs().max() < 1e9 or y.abs().max() > 1e9:
                y = y / 2
            return y

    with pytest.raises(UserError, match=r"a condition .* 50 conditions of it depend on values"):
        trace(Endless(), SAMPLES, inputs=(X, LABELS))


class Halts(nn.Module):
    """Asks bytes whether to go on, and divides by how many a mask keeps, and pads to the longest."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, kept = self.body(x), x[..., 0] > -100
        if (y > 1e9).byte().any() and int(kept.sum()) < 0:
            return y
        return y[:, : int(kept.sum(1).max())] / int(kept.sum())


def test_a_mask_of_which_nothing_is_known_counts_as_many_as_there_are() -> None:
    assert trace(Halts(), SAMPLES, inputs=X).flops == 2 * 2 * SAMPLES * TOKENS * WIDTH * WIDTH
