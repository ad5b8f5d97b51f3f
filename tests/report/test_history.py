from __future__ import annotations

import math

import pytest

from paceline.report.history import History, Row
from tests.report.events import figures


def history(*values: dict) -> History:
    return History(tuple(row for value in values if (row := Row.of(value)) is not None))


RUN = (
    figures(1, 100.0, seconds=4.0),
    figures(10, 109.0),
    figures(20, 119.0),
    {"step": 20, "time": 122.0, "val/loss": 2.5, "val/seconds": 3.0},
)


def test_rates_leave_out_the_first_step_which_warms_up() -> None:
    assert history(*RUN).mean("perf/tokens_per_second") == 100
    assert history(RUN[0]).mean("perf/tokens_per_second") == 25
    assert history().mean("perf/tokens_per_second") is None


def test_rates_are_means_over_time() -> None:
    run = history(figures(1, 0), figures(11, 10, seconds=1.0), figures(21, 40, seconds=3.0))
    # 1000 tokens in each ten steps, which took 10 and 30 seconds.
    assert run.mean("perf/tokens_per_second") == pytest.approx(2000 / 40)


def test_where_the_time_went() -> None:
    spent = history(*RUN).goodput
    assert spent is not None
    assert (spent.useful, spent.validating, spent.repeated, spent.interrupted) == (23, 3, 0, 0)
    assert spent.seconds == 26 and spent.other == 0
    assert spent.share == pytest.approx(23 / 26)


def test_steps_that_are_done_again_count_once() -> None:
    resumed = {"step": 10, "time": 130.0, "run/resumed_from": 10, "run/interrupted_seconds": 5.0}
    run = history(*RUN, resumed, figures(11, 132.0, seconds=1.0), figures(20, 141.0), figures(30, 151.0))
    assert [life.first for life in run.lives] == [0, 10]
    assert [row.step for row in run.kept] == [1, 10, 11, 20, 30]
    assert run.steps == 30
    spent = run.goodput
    assert spent is not None
    assert (spent.useful, spent.repeated, spent.interrupted) == (13 + 20, 10, 5)
    # The second job began at 130 and wrote its last row at 151, a second of which was no step.
    assert spent.other == 1


def test_a_validation_of_steps_that_were_lost_is_none() -> None:
    resumed = {"step": 10, "time": 130.0, "run/resumed_from": 10}
    assert [row.step for row in history(*RUN, resumed, figures(15, 135.0)).validations] == []
    again = {"step": 20, "time": 150.0, "val/loss": 2.25}
    found = history(*RUN, resumed, figures(20, 141.0), again).validations
    assert [(row.step, row.figures["val/loss"]) for row in found] == [(20, 2.25)]


def test_time_in_which_a_stopped_run_did_not_run_is_not_its_own() -> None:
    resumed = {"step": 20, "time": 99_000.0, "run/resumed_from": 20}
    spent = history(*RUN, resumed, figures(30, 99_010.0)).goodput
    assert spent is not None and spent.seconds == 26 + 10


def test_a_clock_that_is_set_back_makes_no_time_negative() -> None:
    spent = history(figures(1, 100.0), figures(10, 50.0)).goodput
    assert spent is not None and spent.other == 0 and spent.share == 1


def test_skipped_steps_are_those_where_their_number_grew() -> None:
    run = history(*(figures(step, step, train__skipped_steps=n) for step, n in ((5, 0), (10, 2), (15, 2), (20, 3))))
    assert run.skipped == [10, 20]


def test_what_is_no_number_is_nan_and_what_is_no_row_is_none() -> None:
    row = Row.of({"step": 3, "time": "now", "train/loss": None, "perf/x": 10**400, "val/name": "x", "loss": 1})
    assert row is not None and math.isnan(row.time)
    assert row.figures.keys() == {"train/loss", "perf/x"} and all(map(math.isnan, row.figures.values()))
    for step in (None, "3", -1, True, 2**60, 1.5):
        assert Row.of({"step": step}) is None
    assert history({"step": 3, "train/loss": None}).goodput is None
    assert history({"step": 3, "train/loss": None}, {"step": 4}).last_figure("train/loss") is None


def test_a_run_that_died_before_its_first_step() -> None:
    empty = history()
    assert (empty.steps, empty.kept, empty.goodput, empty.skipped, empty.lives) == (0, (), None, [], ())
    begun = history({"step": 7, "time": 1.0, "run/resumed_from": 7})
    assert begun.steps == 7 and begun.goodput is None
