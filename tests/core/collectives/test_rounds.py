"""Plans, run on plain lists: every collective is right, and the textbook's numbers come out."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.collectives.algorithms import HIERARCHICAL, find_algorithm, traffic
from paceline.core.collectives.rounds import Algorithm, alpha_beta_seconds, chunk, traffic_of
from tests.comm.reference import FROM_ROOTS, NAMES, expected

MB = 1_000_000
CROSSED = [name for name in NAMES if name.startswith("all_to_all")]
BARRIERS = [name for name in NAMES if name.startswith("barrier")]


def simulate(plan: Algorithm, buffers: list[list[float]]) -> int:
    """Runs a plan on every rank's buffer, round by round; returns the number of rounds."""
    n, numel = len(buffers), len(buffers[0])
    plans = [plan(rank, n, numel) for rank in range(n)]
    for turns in zip(*plans, strict=True):
        before = [list(buffer) for buffer in buffers]
        given = [list(turn.sends) for turn in turns]
        for rank, turn in enumerate(turns):
            for peer, start, stop in turn.receives:
                source = chunk(rank, n, numel) if turn.transposed else (start, stop)
                # What is received is sent in the same round.
                given[peer].remove((rank, *source))
                for i, value in zip(range(start, stop), before[peer][slice(*source)], strict=True):
                    buffers[rank][i] = buffers[rank][i] + value if turn.combine == "add" else value
        assert not any(given), "what is sent is received in the same round"
    return len(plans[0])


def check(plan: Algorithm, collective: str, n: int, numel: int, root: int = 0) -> None:
    inputs = [[float(10**rank * (i + 1)) for i in range(numel)] for rank in range(n)]
    buffers = [list(values) for values in inputs]
    simulate(plan, buffers)
    for rank, buffer in enumerate(buffers):
        given = [torch.tensor(each, dtype=torch.float64) for each in inputs]
        values, where = expected(collective, rank, given, root=root)
        assert buffer[where] == values[where].tolist()


@pytest.mark.parametrize("name", NAMES)
@given(n=st.integers(1, 11), numel=st.integers(0, 25))
def test_every_plan_does_what_its_collective_says(name: str, n: int, numel: int) -> None:
    if name in CROSSED:
        numel -= numel % n
    check(find_algorithm(name), name.partition("/")[0], n, numel)


@pytest.mark.parametrize("name", FROM_ROOTS)
@given(n=st.integers(1, 11), numel=st.integers(0, 25), data=st.data())
def test_from_and_to_any_root(name: str, n: int, numel: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, n - 1))
    check(find_algorithm(f"{name}@{root}"), name.partition("/")[0], n, numel, root)


@given(n=st.integers(1, 11), name=st.sampled_from(FROM_ROOTS), data=st.data())
def test_ranks_change_places_with_another_root_and_bytes_do_not(n: int, name: str, data: st.DataObject) -> None:
    root, numel = data.draw(st.integers(0, n - 1)), 4 * n
    moved = [traffic(f"{name}@{root}", (rank + root) % n, n, numel) for rank in range(n)]
    assert moved == [traffic(name, rank, n, numel) for rank in range(n)]


@pytest.mark.parametrize("collective", HIERARCHICAL)
@given(hosts=st.integers(1, 4), local=st.integers(1, 4), numel=st.integers(0, 25))
def test_hierarchical_plans_too(collective: str, hosts: int, local: int, numel: int) -> None:
    check(find_algorithm(f"{collective}/hierarchical", local), collective, hosts * local, numel)


@pytest.mark.parametrize("name", BARRIERS)
@pytest.mark.parametrize("n", range(1, 12))
def test_nobody_leaves_a_barrier_before_all_have_come(name: str, n: int) -> None:
    plans = [find_algorithm(name)(rank, n, 1) for rank in range(n)]
    heard = [{rank} for rank in range(n)]
    for turns in zip(*plans, strict=True):
        before = [set(known) for known in heard]
        for rank, turn in enumerate(turns):
            heard[rank] |= {other for part in turn.receives if part.stop > part.start for other in before[part.peer]}
    assert heard == [set(range(n))] * n


@given(n=st.integers(1, 11), name=st.sampled_from([name for name in NAMES if "reduce" in name]))
def test_a_round_that_calls_its_sums_complete_has_every_ranks_elements(n: int, name: str) -> None:
    """And every sum that is left at the end comes from such a round."""
    numel = n
    plans = [find_algorithm(name)(rank, n, numel) for rank in range(n)]
    have = [[{rank} for _ in range(numel)] for rank in range(n)]
    for turns in zip(*plans, strict=True):
        before = [[set(x) for x in row] for row in have]
        for rank, turn in enumerate(turns):
            for peer, start, stop in turn.receives:
                for i in range(start, stop):
                    have[rank][i] = (have[rank][i] if turn.combine == "add" else set()) | before[peer][i]
            if turn.complete:
                summed = {i for _, start, stop in turn.receives for i in range(start, stop)}
                assert all(have[rank][i] == set(range(n)) for i in summed)
    completed = [any(turn.complete for turn in rounds) for rounds in plans]
    everyone = n > 1 and name not in ("reduce/server", "reduce/tree", "all_reduce/server", "all_reduce/tree")
    power = 1 << (n.bit_length() - 1)
    if name == "all_reduce/doubling":
        assert completed == [rank < power and n > 1 for rank in range(n)]
    elif name.startswith("reduce_scatter/server"):
        assert completed == [rank == 0 and n > 1 for rank in range(n)]
    else:
        assert completed == [everyone or (rank == 0 and n > 1) for rank in range(n)]


@pytest.mark.parametrize("algorithm", ["direct", "ring", "halving"])
@pytest.mark.parametrize(("n", "times"), [(10, 1.8), (1000, 1.998)])
def test_an_all_reduce_sends_2_n_minus_1_over_n_times_the_buffer(algorithm: str, n: int, times: float) -> None:
    for rank in (0, n - 1):
        moved = traffic(f"all_reduce/{algorithm}", rank, n, MB)
        assert moved == (pytest.approx(times * MB, rel=1e-12),) * 2


@given(n=st.integers(1, 12), k=st.integers(1, 5))
def test_what_the_schedule_counts_does_not_depend_on_the_algorithm(n: int, k: int) -> None:
    known = {
        "all_gather": ["ring", "doubling"],
        "reduce_scatter": ["ring", "halving"],
        "all_reduce": ["ring", "halving"],
    }
    for collective, algorithms in known.items():
        for algorithm, rank in itertools.product(algorithms, range(n)):
            assert traffic(f"{collective}/{algorithm}", rank, n, n * k) == traffic(collective, rank, n, n * k)
        for local in (local for local in range(1, n + 1) if n % local == 0):
            plan = find_algorithm(f"{collective}/hierarchical", local)
            assert traffic_of(plan, n - 1, n, n * k) == traffic(collective, n - 1, n, n * k)


@given(n=st.integers(1, 12), numel=st.integers(0, 40))
def test_traffic_without_a_loop_over_ranks_is_that_of_the_rounds(n: int, numel: int) -> None:
    for name, rank in itertools.product(("all_gather", "reduce_scatter", "all_reduce"), range(n)):
        assert traffic(name, rank, n, numel) == traffic_of(find_algorithm(name), rank, n, numel)


def test_hierarchical_sends_a_share_of_the_buffer_over_the_wire_where_direct_sends_it_for_each_rank() -> None:
    """2 hosts of 2: half a buffer a rank each way leaves the host, against a whole one."""

    def leaving(plan: Algorithm) -> int:
        return sum(part.stop - part.start for turn in plan(0, 4, MB) for part in turn.sends if part.peer >= 2)

    assert leaving(find_algorithm("all_reduce/hierarchical", 2)) == MB // 2
    assert leaving(find_algorithm("all_reduce/direct")) == MB


def test_ring_time_is_wire_time_plus_2_n_minus_1_latencies() -> None:
    ring = find_algorithm("all_reduce/ring")
    assert alpha_beta_seconds(ring, 8, 8 * MB, bandwidth=MB, latency=0.5) == pytest.approx(2 * 7 / 8 * 8 + 14 * 0.5)


@pytest.mark.parametrize("n", range(1, 17))
def test_trees_and_doublings_take_log2_n_rounds(n: int) -> None:
    log = (n - 1).bit_length()
    for name in ("broadcast/tree", "reduce/tree", "scatter/tree", "all_gather/doubling", "reduce_scatter/halving"):
        assert len(find_algorithm(name)(0, n, 64)) == log
    assert len(find_algorithm("all_reduce/halving")(0, n, 64)) == 2 * log


def test_tree_broadcast_to_8_ranks_takes_3_rounds_and_15_seconds_where_a_server_takes_35() -> None:
    tree, server = find_algorithm("broadcast/tree"), find_algorithm("broadcast/server")
    assert alpha_beta_seconds(tree, 8, 5 * MB, bandwidth=MB) == pytest.approx(15)
    assert len(tree(0, 8, 5 * MB)) == 3
    assert alpha_beta_seconds(server, 8, 5 * MB, bandwidth=MB) == pytest.approx(35)


def test_tree_reduce_of_8_ranks_sums_to_minus_0_1_in_3_rounds() -> None:
    buffers = [[value] for value in (0.1, -0.2, -0.3, 0.5, -0.6, -0.1, 0.2, 0.3)]
    assert simulate(find_algorithm("reduce/tree"), buffers) == 3
    assert buffers[0][0] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("allreduce", "expected one of broadcast"),
        ("all_reduce/star", "expected one of direct, ring"),
        ("broadcast/hierarchical", "expected one of server"),
        ("all_reduce/hierarchical", "as many ranks on every host"),
        ("all_reduce/ring@1", "broadcast, reduce, scatter, gather have one, all_reduce has none"),
    ],
)
def test_an_unknown_collective_or_algorithm_is_answered_with_those_there_are(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        find_algorithm(name)
