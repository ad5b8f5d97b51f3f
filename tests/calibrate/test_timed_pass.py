from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.calibrate import rank
from paceline.calibrate.repeated import least
from paceline.calibrate.timed_pass import timed_pass, undisturbed
from paceline.core.strategy import Strategy
from paceline.measuring.loops import parallel
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


@pytest.mark.parametrize(("enough", "passes"), [(0.0, 1), (0.15, 1), (float("inf"), 3)])
def test_what_takes_long_is_repeated_less(enough: float, passes: int) -> None:
    model = Slept(2, 2)
    ran = []
    model.register_forward_hook(lambda *_: ran.append(time.perf_counter()))
    assert timed_pass(model, (torch.ones(1, 2),), 3, enough).seconds > 0
    # Each once with the clock and once without; the first pass counts where it is all that there is.
    assert len(ran) == 2 * {0.0: 1, 0.15: 2}.get(enough, passes + 1)


def test_a_call_that_takes_long_is_its_own_time(ranks) -> None:
    assert ranks(1, slept) == [(1, pytest.approx(0.05, abs=0.04))]


def slept() -> tuple[int, float]:
    ran = list[float]()

    def run() -> None:
        ran.append(time.perf_counter())
        time.sleep(0.05)

    seconds = least(run, 3)
    return len(ran), seconds


@pytest.mark.parametrize("enough", [1e-6, 1e6])
def test_long_steps_of_one_strategy_are_made_less_often(ranks, enough: float) -> None:
    repeats = 3
    for counts, times in ranks(2, stepped, repeats, enough):
        assert counts == ([4, 4] if enough < 1 else [2 * (repeats + 2)] * 2) and min(times) > 0


class Counted:
    """A training that counts its steps."""

    def __init__(self, training: Any) -> None:
        self.training, self.steps = training, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.training, name)

    def step(self) -> Any:
        self.steps += 1
        return self.training.step()


def stepped(repeats: int, enough: float) -> tuple[list[int], list[float]]:
    made = list[Counted]()

    def counted(*given: Any) -> Counted:
        made.append(Counted(parallel(*given)))
        return made[-1]

    with patch.object(rank, "parallel", counted), patch.object(rank, "_ENOUGH", enough):
        times = rank._engine([Strategy(), Strategy(zero=1)], rank.EMPTY, pl.init(), repeats)
    return [each.steps for each in made], times


def test_of_one_thread_the_time_counts_that_it_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert timed_pass(Slept(2, 2), (torch.ones(1, 2),), 3).seconds < 0.05
    # Operators of several threads are not on the caller's clock.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert timed_pass(Slept(2, 2), (torch.ones(1, 2),), 3).seconds > 0.05
