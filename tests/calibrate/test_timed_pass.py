from __future__ import annotations

import torch

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
