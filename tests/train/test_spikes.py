"""Steps that stand out: against NumPy, over a resume, and in trainings of two ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.train.spikes import LEAST, STEPS, Spikes
from tests.quick import full
from tests.ranks import RankPool
from tests.train.processes import trained
from tests.train.test_not_finite import forward_gives

CPU = torch.device("cpu")


def found(spikes: Spikes, loss: float, norm: float) -> bool:
    answer = bool(spikes.found(torch.tensor(loss), torch.tensor(norm)))
    spikes.stepped()
    return answer


def stands_out(before: list[float], value: float, deviations: float) -> bool:
    window = np.array([each for each in before[-STEPS:] if np.isfinite(each)], np.float64)
    return len(window) >= LEAST and value > window.mean() + deviations * window.std(ddof=1)


@given(st.integers(0, 1000), st.integers(0, 4 * STEPS), st.sampled_from([2.0, 4.0, 6.0]))
def test_a_step_stands_out_if_it_is_beyond_so_many_deviations_of_the_window(
    seed: int, steps: int, deviations: float
) -> None:
    random, spikes = np.random.default_rng(seed), Spikes(deviations, CPU)
    losses, norms = ([float(each) for each in 2 + random.exponential(size=steps)] for _ in range(2))
    for values in (losses, norms):
        for step in random.integers(0, max(1, steps), steps // 9):
            values[step] = random.choice([np.nan, np.inf, 1e3])
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        expected = stands_out(losses[:step], loss, deviations) or stands_out(norms[:step], norm, deviations)
        assert found(spikes, loss, norm) == expected


def test_a_level_that_stays_is_usual_after_a_while() -> None:
    spikes = Spikes(6.0, CPU)
    random = np.random.default_rng(0)
    answers = [found(spikes, float(20.0 * (step >= 100) + random.normal()), 1.0) for step in range(110)]
    assert answers.index(True) == 100 and not answers[-1]


def test_it_goes_on_from_its_state() -> None:
    one, other = Spikes(3.0, CPU), Spikes(3.0, CPU)
    random = np.random.default_rng(1)
    for _ in range(STEPS + 9):
        found(one, float(random.normal()), float(random.normal()))
    other.load_state_dict(one.state_dict())
    values = random.normal(size=(50, 2)) * 3
    assert [found(one, *map(float, row)) for row in values] == [found(other, *map(float, row)) for row in values]


AT = LEAST + 6


def spikes_on_rank_1() -> AbstractContextManager[None]:
    rank = pl.init().rank
    return forward_gives(lambda loss, call: loss * 100 if rank == 1 and call == AT else loss)


@pytest.mark.parametrize(("setting", "skipped"), [("6", 1), full("0", 0)])
def test_a_spike_on_one_rank_is_left_out_by_all(
    ranks: RankPool, nano: list[str], tmp_path: Path, setting: str, skipped: int
) -> None:
    flags = ["--steps", str(AT + 4), "--log.every", "1", "--log.validate_every", "0", "--optim.skip-spikes", setting]
    status, out, err = trained(ranks, 2, tmp_path, [*nano, *flags], spikes_on_rank_1)
    assert status == 0, err
    assert out.count("is more than 6 standard deviations above the steps before, so all ranks left this") == skipped
    assert out.count(f"step {AT}: the loss (") == skipped
    assert len(list((tmp_path / "runs" / "latest").glob("skipped.jsonl"))) == skipped
