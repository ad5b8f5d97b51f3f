from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.events import Event
from paceline.report.steps import mean_times, straggler
from tests.report.events import SLOW, collective, compute, step


def test_where_a_ranks_time_goes() -> None:
    first, second = step(SLOW).ranks
    assert (first.computing, first.exposed, first.waiting, first.between) == (4, 3, 2, 0)
    assert (second.computing, second.exposed, second.waiting, second.between) == (6.5, 1, 0, 0)
    assert (first.last, second.last, second.meetings) == (0, 1, 1)
    assert (first.cost, second.cost) == (0, 2)
    assert first.seconds == 7 and second.seconds == 7.5


def test_standing_still_inside_an_op_is_no_computing() -> None:
    (only,) = step([compute("forward", 0, 0, 4), collective(0, 1, 3, exposed=1.5)], 1).ranks
    assert (only.computing, only.exposed, only.between) == (2.5, 1.5, 0)


def test_the_slow_rank_is_named_with_what_it_costs_and_why() -> None:
    slow = straggler([step(SLOW)] * 5)
    assert slow is not None
    assert (slow.rank, slow.steps, slow.last, slow.cost, slow.cause) == (1, 5, 1, 2, "computing")
    assert slow.of_step == pytest.approx(2 / 7.5)


def test_one_step_that_stalled_is_not_taken_for_the_cause() -> None:
    late = [moved(event, 100 * (event.rank == 1 and event.kind != "forward")) for event in SLOW]
    slow = straggler([step(SLOW)] * 4 + [step(late)])
    assert slow is not None and slow.cause == "computing"


def moved(event: Event, by: float) -> Event:
    return replace(event, start=event.start + by, end=event.end + by)


def test_a_rank_that_begins_late_waited_before_its_step() -> None:
    one = [compute("backward", 0, 0, 1), collective(0, 1, 5, exposed=4), compute("update", 0, 5, 6)]
    other = [compute("backward", 1, 3, 4), collective(1, 4, 5, exposed=1), compute("update", 1, 5, 6)]
    slow = straggler([step([*one, *other])] * 5)
    assert slow is not None and slow.rank == 1 and "before its first op" in slow.cause


def test_a_rank_that_pauses_between_ops() -> None:
    one = [compute("forward", 0, 0, 1), compute("backward", 0, 1, 2), collective(0, 2, 6, exposed=4)]
    other = [compute("forward", 1, 0, 1), compute("backward", 1, 4, 5), collective(1, 5, 6, exposed=1)]
    slow = straggler([step([*one, *other, compute("update", 0, 6, 7), compute("update", 1, 6, 7)])] * 5)
    assert slow is not None and slow.rank == 1 and slow.cause == "what it does between ops"


def test_equal_ranks_and_single_ones_are_not_blamed() -> None:
    mirrored = [replace(event, rank=1 - event.rank) for event in SLOW]
    assert straggler([step(SLOW), step(mirrored)] * 5) is None
    assert straggler([step(SLOW[:4], 1)] * 5) is None
    assert straggler([]) is None
    small = [moved(event, 1000) if event.kind == "update" else event for event in SLOW]
    assert straggler([step(small)] * 5) is None


@pytest.mark.parametrize(("slow", "steps", "is_named"), [(2, 2, False), (3, 3, True), (7, 10, False), (8, 10, True)])
def test_what_may_be_chance_names_nobody(slow: int, steps: int, is_named: bool) -> None:
    mirrored = [replace(event, rank=1 - event.rank) for event in SLOW]
    found = straggler([step(SLOW)] * slow + [step(mirrored)] * (steps - slow))
    assert (found is not None and found.rank == 1) == is_named


def test_means_are_over_steps() -> None:
    mirrored = [replace(event, rank=1 - event.rank) for event in SLOW]
    first, second = mean_times([step(SLOW), step(mirrored)])
    assert first.computing == second.computing == 5.25
    assert (first.last, first.meetings, first.cost) == (1, 2, 1)
