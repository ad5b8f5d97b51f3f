from __future__ import annotations

import random
from itertools import pairwise

import pytest

from paceline.core.events import Event
from paceline.core.ops import Key
from paceline.core.simulate import simulate
from paceline.core.strategy import Strategy
from paceline.report.critical_path import Segment, critical_path
from paceline.report.meetings import groups_of, meetings
from tests.core.test_simulate import schedule
from tests.report.events import SLOW, collective, compute


def path(events: list[Event], world: int = 2) -> list[Segment]:
    return critical_path(events, meetings(events, groups_of(None, world)))


def short(segments: list[Segment]) -> list[tuple[str, int, float, float]]:
    return [(segment.what, segment.rank, segment.start, segment.end) for segment in segments]


def test_it_leads_through_the_rank_that_came_last() -> None:
    assert short(path(SLOW)) == [
        ("computing", 1, 0, 1),
        ("computing", 1, 1, 5),
        ("communicating", 1, 5, 6),
        ("computing", 1, 6, 7.5),
    ]


def test_it_changes_ranks_where_they_meet() -> None:
    last = [*SLOW[:3], compute("update", 0, 6, 9), *SLOW[4:]]
    assert short(path(last)) == [
        ("computing", 1, 0, 1),
        ("computing", 1, 1, 5),
        ("communicating", 0, 5, 6),
        ("computing", 0, 6, 9),
    ]


def test_pauses_between_ops_are_part_of_it_and_hidden_collectives_are_not() -> None:
    events = [compute("forward", 0, 0, 1), collective(0, 1, 2), compute("backward", 0, 1.5, 4)]
    assert short(path(events, 1)) == [("computing", 0, 0, 1), ("between ops", 0, 1, 1.5), ("computing", 0, 1.5, 4)]


def test_a_rank_that_stands_still_in_the_middle_of_an_op() -> None:
    events = [compute("forward", 0, 0, 1), collective(0, 1, 3, exposed=1), compute("backward", 0, 1, 5)]
    assert short(path(events, 1)) == [("computing", 0, 0, 1), ("communicating", 0, 1, 3), ("computing", 0, 3, 5)]


def test_a_collective_that_was_over_when_it_was_asked_for_is_not_on_it() -> None:
    events = [compute("forward", 0, 0, 1), collective(0, 1, 3, exposed=2e-6), compute("backward", 0, 1, 5)]
    assert short(path(events, 1)) == [("computing", 0, 0, 1), ("computing", 0, 1, 5)]


def test_a_collective_began_after_what_the_schedule_says() -> None:
    # The second op ends just before the collective begins, which waited for another collective.
    events = [
        compute("forward", 0, 0, 1),
        collective(0, 1, 4, target="first", after=()),
        compute("backward", 0, 1, 4),
        collective(0, 4, 6, target="second", exposed=2, after=(Key("forward", "a", 0, "forward"),)),
        compute("update", 0, 6, 7),
    ]
    assert [s.event.target for s in path(events, 1) if s.event and s.what == "communicating"] == ["first", "second"]


def test_without_events_there_is_none() -> None:
    assert path([]) == []
    assert path([collective(0, 1, 2)]) == []


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_it_is_as_long_as_the_step_and_without_a_gap(zero: int) -> None:
    rng = random.Random(zero)
    costs = {}
    events = simulate(
        schedule(Strategy(zero=zero, bucket_mb=1e-6), units=5), lambda op: costs.setdefault(op.key, rng.random()), 2, 3
    )
    mine = [event for event in events if event.step == 1]
    found = path(mine, 1)
    ran = [event for event in mine if event.stream == "compute"]
    assert found[-1].end == max(event.end for event in ran)
    assert found[0].start <= min(event.start for event in ran)
    for one, other in pairwise(found):
        assert one.end == pytest.approx(other.start)
        assert one.seconds >= 0
