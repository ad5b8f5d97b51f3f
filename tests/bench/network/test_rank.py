"""What the ranks of `paceline bench network` time, on one host that plays two."""

from __future__ import annotations

from unittest.mock import patch

import pytest

import paceline as pl
from paceline.bench.network import rank
from paceline.bench.network.turns import Timed

SIZE = 64 << 10


def exchanged() -> list[Timed]:
    world = pl.init()
    with (
        patch("paceline.comm.connect._host", lambda: f"host {world.rank // 2}"),
        patch.object(rank, "SIZES", {"64 KiB": SIZE}),
        patch.object(rank, "TURN_SECONDS", 0.001),
        # No wire, so no interface that counts.
        patch("paceline.bench.network.turns.sent_bytes", lambda: 0),
    ):
        return rank.EXPERIMENTS["hierarchical"](rank.Job("hierarchical", 2, 2, 125e6, rounds=2), world)


@pytest.mark.full
def test_collectives_between_hosts_are_checked_and_timed_beside_gloo(ranks) -> None:
    timed = ranks(4, exchanged)[0]
    expected = []
    for op, sends in (("all_reduce", SIZE), ("reduce_scatter", SIZE / 2), ("all_gather", SIZE / 2)):
        ours = [f"{op}/{name} over shared memory and tcp" for name in ("direct", "ring", "hierarchical")]
        expected += [("Gloo", op, sends), *(("paceline", setting, sends) for setting in ours)]
    assert [(one.system, one.setting, one.size) for one in timed] == expected
    assert all(one.case == "64 KiB" and len(one.seconds) == 2 and min(one.seconds) > 0 for one in timed)


def skips(op: str) -> str:
    """The complaint about a collective that does nothing."""
    world = pl.init()
    whole, part = rank.torch.zeros(8), rank.torch.zeros(4)
    idle = rank.Contestant("a library", op, 32, lambda: None)
    try:
        rank.check(idle, op, whole, part, world)
    except AssertionError as error:
        return str(error)
    return "nothing"


@pytest.mark.full
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_collective_that_does_nothing_is_found_out(ranks, op: str) -> None:
    assert all(words.startswith(f"a library, {op}: expected") for words in ranks(2, skips, op))
