"""The rank that others wait for is told while a run goes on, as the report tells it afterwards."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.core.events import Event
from paceline.core.strategy import Strategy
from paceline.report.meetings import groups_of
from paceline.report.steps import Step
from paceline.train.slow_rank import SlowRank
from tests.ranks import RankPool
from tests.report.events import SLOW, collective, recording
from tests.train.processes import metrics, trained
from tests.train.test_not_finite import forward_gives

WORLD = {"reduce": [[0, 1]]}


def slow_rank(groups: dict[str, list[list[int]]]) -> Any:
    return SlowRank(SimpleNamespace(groups={name: name for name in groups}, ranks_of=groups.__getitem__))  # type: ignore[arg-type]


def read(groups: dict[str, list[list[int]]], steps: list[list[Event]], ranks: int, seconds: float = 7.5) -> Any:
    """What rank 0 finds in steps, before which there was one to warm up."""
    readers = [slow_rank(groups) for _ in range(ranks)]
    accounts = [reader.account([event for each in steps for event in each if event.rank == rank])
                for rank, reader in enumerate(readers)]  # fmt: skip
    return readers[0], readers[0].found(accounts, seconds)


def at(step: int, events: list[Event], swapped: bool = False) -> list[Event]:
    return [
        Event(**(event.to_dict() | {"step": step, "rank": 1 - event.rank if swapped else event.rank}))
        for event in events
    ]


def test_the_slow_rank_is_named_with_what_it_costs() -> None:
    _, found = read(WORLD, [at(number, SLOW) for number in range(6)], 2)
    assert (found.rank, found.steps, found.cost) == (1, 5, pytest.approx(2.0))


def test_neither_chance_nor_trifles_name_a_rank() -> None:
    assert read(WORLD, [at(number, SLOW, number % 2 == 0) for number in range(9)], 2)[1] is None
    assert read(WORLD, [at(number, SLOW) for number in range(3)], 2)[1] is None
    assert read(WORLD, [at(number, SLOW) for number in range(9)], 2, seconds=500)[1] is None


@pytest.mark.parametrize("ahead", [0.0, 1000.0])
@pytest.mark.parametrize("shard", [0, 2])
def test_costs_are_those_of_the_report(shard: int, ahead: float) -> None:
    random, strategy = np.random.default_rng(0), Strategy(zero=1, shard=shard)
    groups = {"reduce": [[0, 1], [2, 3]] if shard else [[0, 1, 2, 3]], "replicate": [[0, 2], [1, 3]]}
    streams = ["reduce", "replicate"] if shard else ["reduce"]
    events = []
    for number in range(12):
        stream = streams[number % len(streams)]
        for group in groups[stream]:
            starts = number + random.uniform(0, 0.4, len(group)).round(6)
            end = float(starts.max()) + 0.2
            for rank, start in zip(group, starts.tolist(), strict=True):
                # In groups of two, hosts' clocks: ranks 2 and 3 are another's.
                shift = ahead * (rank >= 2)
                exposed = round((end - start) * float(random.uniform(0.5, 1)), 6)
                values = {"kind": "all_reduce", "target": str(number), "stream": stream, "step": 1, "exposed": exposed}
                events.append(collective(rank, start + shift, end + shift, **values))
    expected = Step(recording(sorted(events, key=lambda e: e.rank)), groups_of(strategy, 4)).ranks
    warm = [Event(**(event.to_dict() | {"step": 0})) for event in events]
    reader, _ = read(groups, [warm, events], 4)
    assert reader._costs[0] == pytest.approx({each.rank: each.cost for each in expected}, abs=1e-4)


def test_steps_that_ranks_do_not_share_do_not_count() -> None:
    steps = [[event for event in at(number, SLOW) if event.rank == 0 or number < 4] for number in range(6)]
    assert len(read(WORLD, steps, 2)[0]._costs) == 3


def sleeps_on_rank_1() -> AbstractContextManager[None]:
    rank = pl.init().rank

    def late(loss: torch.Tensor, call: int) -> torch.Tensor:
        time.sleep(0.05 * (rank == 1))
        return loss

    return forward_gives(late)


@pytest.mark.full
@pytest.mark.parametrize("zero", ["0", "3"])
def test_a_run_says_within_twenty_steps_which_rank_it_waits_for(
    ranks: RankPool, nano: list[str], tmp_path: Path, zero: str
) -> None:
    flags = ["--steps", "20", "--log.every", "10", "--log.validate_every", "0", "--strategy.zero", zero]
    status, out, err = trained(ranks, 2, tmp_path, [*nano, *flags], sleeps_on_rank_1)
    assert status == 0, err
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    assert "slow: rank 1 costs the others" not in lines[0] and "slow: rank 1 costs the others" in lines[1]
    told = [line for line in metrics(tmp_path / "runs" / "latest") if "comm/slow_rank" in line]
    assert [line["comm/slow_rank"] for line in told] == [1, 1]
    assert 0.02 < told[-1]["comm/slow_rank_seconds"] < told[-1]["perf/step_seconds"]
