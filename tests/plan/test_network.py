from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.hardware import Device, Hardware, Kernels, Link
from paceline.plan.network import Spread, seconds, spread

DEVICE = Device("made up", 80 << 30, 2e12, {"bfloat16": 3e14}, {"bfloat16": 2.5e14})
HARDWARE = Hardware(DEVICE, Kernels(0.0, 1.0, 1.0, 0.0, 0.5), 8, Link(0.0, 200e9), Link(0.0, 25e9))


def test_where_groups_are() -> None:
    assert spread(4, 8) == Spread(4, 1)
    assert spread(64, 8) == Spread(8, 8)
    # One rank of each group of 8 neighbours is one rank of each host.
    assert spread(16, 8, stride=8) == Spread(1, 16)
    assert spread(8, 8, stride=2) == Spread(4, 2)


def test_a_ring_moves_what_the_sources_say() -> None:
    # 2 (N - 1) / N x M / B.
    assert seconds("all_reduce", 1e9, Spread(8, 1), HARDWARE) == pytest.approx(2 * 7 / 8 * 1e9 / 200e9)
    assert seconds("all_gather", 1e9, Spread(1, 1), HARDWARE) == 0
    # Two hosts: each takes in half of it over its 8 wires of 25 GB/s, slower than within.
    assert seconds("all_gather", 1e9, Spread(8, 2), HARDWARE) == pytest.approx(15 / 16 * 1e9 / 200e9)
    # One rank of each host has one wire.
    assert seconds("reduce_scatter", 1e9, Spread(1, 4), HARDWARE) == pytest.approx(3 / 4 * 1e9 / 25e9)


@given(
    size=st.floats(1, 1e12),
    ranks=st.integers(1, 10**5),
    kind=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"]),
)
def test_more_bytes_never_take_less(size: float, ranks: int, kind: str) -> None:
    group = spread(ranks, 8)
    assert group.ranks >= ranks
    assert 0 <= seconds(kind, size, group, HARDWARE) <= seconds(kind, 2 * size, group, HARDWARE)
