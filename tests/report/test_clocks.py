from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.events import Event
from paceline.core.strategy import Strategy
from paceline.report.clocks import offsets
from paceline.report.meetings import groups_of, meetings
from tests.report.events import SLOW, collective, step


def ahead(events: list[Event], rank: int, seconds: float) -> list[Event]:
    return [replace(e, start=e.start + seconds, end=e.end + seconds) if e.rank == rank else e for e in events]


def test_clocks_of_one_host_stay_as_they_are_whoever_is_slow() -> None:
    assert offsets(meetings(SLOW, groups_of(None, 2))) == {}


@pytest.mark.parametrize("seconds", [-5000.0, 12.5, 1e6])
def test_another_hosts_clock_is_set_by_how_collectives_end(seconds: float) -> None:
    set_right = step(ahead(SLOW, 1, seconds))
    assert set_right.clocks[1].seconds == pytest.approx(seconds)
    assert set_right.clocks[1].is_steady
    assert [event.start for event in set_right.events] == pytest.approx([event.start for event in SLOW])
    assert set_right.ranks[0].waiting == pytest.approx(2)


def test_the_spread_says_how_well_the_offset_is_known() -> None:
    ends = [10.0, 10.1, 10.3, 10.6]
    events = [collective(0, at, at + 1, target=str(at)) for at in range(0, 8, 2)]
    events += [
        collective(1, at + 9.5, at + 1 + end, target=str(at)) for at, end in zip(range(0, 8, 2), ends, strict=True)
    ]
    found = offsets(meetings(events, groups_of(None, 2)))[1]
    assert found.seconds == pytest.approx(10.2)
    assert 0.1 < found.spread < 0.3


def test_a_clock_that_jumps_is_told() -> None:
    events = [collective(0, at, at + 1, target=str(at)) for at in (0, 2, 4)]
    events += [collective(1, at + by, at + 1 + by, target=str(at)) for at, by in ((0, 10), (2, 10), (4, 500))]
    assert not offsets(meetings(events, groups_of(None, 2)))[1].is_steady


def test_what_one_rank_may_leave_alone_tells_nothing_of_clocks() -> None:
    events = [collective(0, 0, 1, kind="broadcast"), collective(1, 3, 4, kind="broadcast")]
    assert offsets(meetings(events, groups_of(None, 2))) == {}


def test_ranks_that_meet_in_several_groups_have_their_hosts_clock() -> None:
    events = []
    for number, (stream, groups) in enumerate([("reduce", [(0, 1), (2, 3)]), ("replicate", [(0, 2), (1, 3)])] * 3):
        for rank in (rank for group in groups for rank in group):
            begins = number + 0.1 * rank
            events.append(collective(rank, begins, number + 1, stream=stream, target=str(number)))
    events = ahead(ahead(events, 2, 70.0), 3, 70.0)
    found = offsets(meetings(sorted(events, key=lambda e: e.rank), groups_of(Strategy(zero=1, shard=2), 4)))
    assert {rank: offset.seconds for rank, offset in found.items()} == pytest.approx({2: 70.0, 3: 70.0})
