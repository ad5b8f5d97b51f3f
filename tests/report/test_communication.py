from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.strategy import Strategy
from paceline.report.communication import collectives
from paceline.report.meetings import groups_of
from paceline.report.steps import Step
from tests.report.events import SLOW, collective, recording, step


def test_what_a_collective_sent_took_and_cost() -> None:
    (found,) = collectives([step(SLOW)])
    assert (found.name, found.count, found.bytes, found.sent, found.formula) == (
        "all_reduce, backward",
        1,
        1000,
        1000,
        1000,
    )
    # Rank 0 stands still for 3 seconds, 2 of them for rank 1, which stands still for 1.
    assert (found.seconds, found.exposed, found.waiting) == (1, 2, 1)
    assert (found.algorithm_bandwidth, found.bus_bandwidth) == (1000, 1000)


def test_figures_are_of_a_step_on_average() -> None:
    other = [replace(event, target="1") for event in SLOW if event.kind == "all_reduce"]
    (found,) = collectives([step(SLOW), step([*SLOW, *other])])
    assert (found.count, found.bytes, found.seconds) == (1.5, 1500, 1.5)
    assert [one.name for one in collectives([step([*SLOW, *other])], by_target=True)] == [
        "all_reduce of 0, backward",
        "all_reduce of 1, backward",
    ]


def test_a_rank_takes_part_in_one_group_of_several() -> None:
    events = [collective(rank, 0, 2, kind="all_gather", stream="gather", sent=500) for rank in range(4)]
    (found,) = collectives([Step(recording(events), groups_of(Strategy(zero=3, shard=2), 4))])
    assert (found.count, found.bytes, found.sent, found.formula, found.seconds) == (1, 1000, 500, 500, 2)


def test_where_ranks_became_more_on_the_way_a_step_has_what_its_ranks_did() -> None:
    two, three = ([collective(rank, 0, 2) for rank in range(n)] for n in (2, 3))
    (found,) = collectives([step(two), step(three, 3)])
    assert (found.count, found.bytes, found.sent, found.seconds) == (1, 1000, 1000, 2)


def test_collectives_over_groups_and_over_all_ranks_are_each_ranks_own() -> None:
    groups = groups_of(Strategy(zero=3, shard=2), 4)
    over_all = [collective(rank, 0, 1, target="statistics", stream="statistics", sent=8) for rank in range(4)]
    replicas = [collective(rank, 2, 4, stream="replicate") for rank in range(4)]
    (found,) = collectives([Step(recording([*over_all, *replicas]), groups)])
    assert (found.count, found.bytes, found.sent, found.seconds) == (2, 2000, 1008, 3)


@pytest.mark.parametrize(("kind", "world"), [("broadcast", 2), ("barrier", 2), ("all_reduce", 1)])
def test_where_ranks_do_not_send_alike_there_is_no_formula(kind: str, world: int) -> None:
    events = [collective(rank, 0, 2, kind=kind) for rank in range(world)]
    assert collectives([step(events, world)])[0].formula is None


def test_without_steps_there_is_none() -> None:
    assert collectives([]) == []
