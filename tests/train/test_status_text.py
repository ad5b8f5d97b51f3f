from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from paceline.train import status_text as module
from paceline.train.status_text import TrainingProgress, ValidationProgress, with_bar


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that stands still until a test moves it."""
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_figures_come_when_they_mean_something(clock: SimpleNamespace) -> None:
    progress = TrainingProgress(1000)
    assert "step 0/1000" in progress.text(80)
    clock.now += 60
    # The first step warms up: its time is in no rate.
    progress.step(1, 100, 500.0)
    assert "step    1/1000" in progress.text(80) and "ETA" not in progress.text(80)
    for step in range(2, 4):
        clock.now += 0.5
        progress.step(step, 100, 300.0)
    assert "loss 3.0000  200 tokens/s" in progress.text(80) and "ETA" not in progress.text(80)
    for step in range(4, 12):
        clock.now += 0.5
        progress.step(step, 100, 300.0)
    assert progress.text(80).endswith("ETA 8:14")
    progress.exposed(0.034)
    assert "comm exposed 3.4 %" in progress.text(100)
    # Time goes on while a step lasts.
    clock.now += 4
    assert progress.text(80).endswith("ETA 8:10")


def test_a_step_that_was_left_out_gives_no_loss(clock: SimpleNamespace) -> None:
    progress = TrainingProgress(10)
    for step, nats in ((1, 1.0), (2, 200.0), (3, math.nan), (4, 200.0)):
        clock.now += 1
        progress.step(step, 100, nats)
    assert "loss 2.0000  67 tokens/s" in progress.text(80)


def test_rates_are_of_the_last_seconds_and_pauses_belong_to_no_step(clock: SimpleNamespace) -> None:
    progress = TrainingProgress(10_000)
    for step in range(1, 200):
        clock.now += 1.0 if step < 100 else 0.1
        progress.step(step, 100, 200.0)
    progress.pause()
    clock.now += 3600
    assert "validat" not in progress.text(80)
    for step in range(200, 320):
        progress.step(step, 100, 200.0)
        clock.now += 0.1
    assert "1,000 tokens/s" in progress.text(80)


def test_a_validation_says_how_far_it_has_come(clock: SimpleNamespace) -> None:
    progress = ValidationProgress()
    assert "0 %" in progress.text(60) and "ETA" not in progress.text(60)
    clock.now += 5
    progress.advance(25, 100)
    assert progress.text(60).endswith("25 %  ETA 0:15")


@pytest.mark.parametrize("columns", [20, 40, 79])
def test_the_bar_takes_what_room_there_is(columns: int) -> None:
    line = with_bar("step 5/10", 0.5, ["loss 1.0"], columns)
    assert len(line) <= columns
    bar = line.replace("step 5/10", "").replace("loss 1.0", "").strip()
    assert len(bar) == (0 if columns == 20 else min(40, columns - 21)) and (not bar or set(bar) <= set("█░#-"))
