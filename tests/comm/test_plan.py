"""Plans, run on plain lists: every collective is right, and the textbook's numbers come out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.plan import PLANS, seconds, traffic

MB = 1_000_000


def simulate(collective: str, buffers: list[list[float]]) -> int:
    """Runs a plan on every rank's buffer, round by round; returns the number of rounds."""
    n, numel = len(buffers), len(buffers[0])
    plans = [PLANS[collective](rank, n, numel) for rank in range(n)]
    for turns in zip(*plans, strict=True):
        before = [list(buffer) for buffer in buffers]
        for rank, turn in enumerate(turns):
            for peer, start, stop in turn.receives:
                assert (rank, start, stop) in turns[peer].sends, "what is received is sent in the same round"
                for i in range(start, stop):
                    value = before[peer][i]
                    buffers[rank][i] = buffers[rank][i] + value if turn.combine == "add" else value
        sends = sum(len(turn.sends) for turn in turns)
        assert sends == sum(len(turn.receives) for turn in turns)
    return len(plans[0])


@given(st.integers(1, 8), st.integers(0, 20), st.sampled_from(["all_reduce", "ring_all_reduce"]))
def test_all_reduce_gives_every_rank_the_sum(n, numel, collective) -> None:
    buffers = [[float(10**rank * (i + 1)) for i in range(numel)] for rank in range(n)]
    expected = [sum(column) for column in zip(*buffers, strict=True)]
    simulate(collective, buffers)
    assert buffers == [expected] * n


@given(st.integers(1, 8), st.integers(0, 9), st.sampled_from(["reduce", "tree_reduce"]))
def test_reduce_gives_rank_0_the_sum(n, numel, collective) -> None:
    buffers = [[float(10**rank * (i + 1)) for i in range(numel)] for rank in range(n)]
    expected = [sum(column) for column in zip(*buffers, strict=True)]
    simulate(collective, buffers)
    assert buffers[0] == expected


@given(st.integers(1, 9), st.integers(0, 9), st.sampled_from(["broadcast", "tree_broadcast"]))
def test_broadcast_gives_every_rank_rank_0s_values(n, numel, collective) -> None:
    buffers = [[float(rank)] * numel for rank in range(n)]
    simulate(collective, buffers)
    assert buffers == [[0.0] * numel] * n


@pytest.mark.parametrize("collective", ["all_reduce", "ring_all_reduce"])
@pytest.mark.parametrize(("n", "times"), [(10, 1.8), (1000, 1.998)])
def test_an_all_reduce_sends_2_n_minus_1_over_n_times_the_buffer(collective: str, n: int, times: float) -> None:
    assert traffic(collective, 0, n, MB).sent == pytest.approx(times * MB, rel=1e-12)
    assert traffic(collective, n - 1, n, MB).received == pytest.approx(times * MB, rel=1e-12)


def test_ring_time_is_wire_time_plus_2_n_minus_1_latencies() -> None:
    assert seconds("ring_all_reduce", 8, 8 * MB, bandwidth=MB, latency=0.5) == pytest.approx(2 * 7 / 8 * 8 + 14 * 0.5)


def test_tree_broadcast_to_8_ranks_takes_3_rounds_and_15_seconds_where_a_server_takes_35() -> None:
    assert seconds("tree_broadcast", 8, 5 * MB, bandwidth=MB) == pytest.approx(15)
    assert len(PLANS["tree_broadcast"](0, 8, 5 * MB)) == 3
    assert seconds("broadcast", 8, 5 * MB, bandwidth=MB) == pytest.approx(35)


def test_tree_reduce_of_8_ranks_sums_to_minus_0_1_in_3_rounds() -> None:
    buffers = [[value] for value in (0.1, -0.2, -0.3, 0.5, -0.6, -0.1, 0.2, 0.3)]
    assert simulate("tree_reduce", buffers) == 3
    assert buffers[0][0] == pytest.approx(-0.1)
