from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from paceline.calibrate.timed_pass import timed_pass, undisturbed
from paceline.models.presets import PRESETS
from paceline.models.transformer import Transformer
from paceline.plan.trace import trace


def test_the_operators_that_are_timed_are_those_that_are_planned() -> None:
    model = Transformer(PRESETS["nano"])
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    found = timed_pass(model, (tokens, tokens), 2)
    planned = trace(model, 2, device="cpu")
    assert sum(each.operation.flops * each.operation.count for each in found.calls) == planned.flops
    # The loss's own gradient, a one, is nobody's work.
    assert {each.operation.name for each in found.calls} - {"ones_like"} == {
        each.name for unit in planned.units for each in (*unit.forward, *unit.backward)
    }
    assert all(each.seconds > 0 for each in found.calls)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_time_that_others_lengthened_counts_for_nothing() -> None:
    assert undisturbed([3.0, 1.0, 90.0, 2.0]) == 2.0
    assert undisturbed([5.0]) == 5.0


class Slept(nn.Linear):
    """Lets others have the core for a while."""

    def forward(self, given: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(given).sum()


def test_of_one_thread_the_time_counts_that_it_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert timed_pass(Slept(2, 2), (torch.ones(1, 2),), 3).seconds < 0.05
    # Operators of several threads are not on the caller's clock.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert timed_pass(Slept(2, 2), (torch.ones(1, 2),), 3).seconds > 0.05
