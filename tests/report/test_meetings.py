from __future__ import annotations

import pytest

from paceline.core.strategy import Strategy
from paceline.report.meetings import Meeting, groups_of, meetings
from tests.report.events import SLOW, collective


def test_who_came_last_by_how_much_and_what_the_collective_took_since_then() -> None:
    (met,) = meetings(SLOW, groups_of(None, 2))
    assert (met.last.rank, met.came, met.late, met.seconds) == (1, 5, 2, 1)
    assert [met.waited(event) for event in met.events] == [2, 0]
    assert met.is_whole


def test_only_what_a_rank_stood_still_counts_as_waiting() -> None:
    # Rank 0 computed until 4.5; the other came at 5.
    hidden = collective(0, 3, 6, exposed=1.5)
    (met,) = meetings([hidden, collective(1, 5, 6)], groups_of(None, 2))
    assert met.waited(hidden) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kind", "ranks", "share"),
    [("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("reduce_scatter", 2, 0.5), ("broadcast", 4, 1.0)],
)
def test_bandwidths_follow_from_the_bytes_that_have_to_be_sent(kind: str, ranks: int, share: float) -> None:
    events = [collective(rank, 0, 2, kind=kind) for rank in range(ranks)]
    (met,) = meetings(events, groups_of(None, ranks))
    assert met.algorithm_bandwidth == 500
    assert met.bus_bandwidth == 500 * share


def test_a_collective_without_some_ranks_or_alone_or_of_no_time_has_no_bandwidth() -> None:
    for events, world in (([collective(0, 0, 2)], 2), ([collective(0, 0, 2)], 1), ([collective(0, 2, 2)], 1)):
        (met,) = meetings(events, groups_of(None, world))
        assert met.bus_bandwidth is None and not met.is_whole
    both: Meeting = meetings([collective(0, 2, 2), collective(1, 2, 2)], groups_of(None, 2))[0]
    assert both.bus_bandwidth is None


def test_all_meet_where_the_strategy_has_no_place_for_so_many() -> None:
    assert groups_of(Strategy(zero=3, shard=2), 3)(collective(2, 0, 1)) == (0, 1, 2)


def test_ranks_meet_in_the_groups_of_the_mesh() -> None:
    groups = groups_of(Strategy(zero=3, shard=2), 4)
    streams = {"gather": "all_gather", "replicate": "all_reduce", "statistics": "all_reduce"}
    events = [collective(rank, 0, 1, stream=stream, kind=streams[stream]) for stream in streams for rank in range(4)]
    assert sorted(met.ranks for met in meetings(events, groups)) == [(0, 1), (0, 1, 2, 3), (0, 2), (1, 3), (2, 3)]


def test_passes_that_are_no_part_of_a_step_are_no_meetings() -> None:
    assert meetings([collective(0, 0, 1, planned=False)], groups_of(None, 2)) == []
