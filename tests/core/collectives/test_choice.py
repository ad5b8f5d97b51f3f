from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.collectives.algorithms import ALGORITHMS, find_algorithm
from paceline.core.collectives.choice import Link, Topology, choose, predict_seconds
from paceline.core.collectives.rounds import alpha_beta_seconds

NEAR, FAR = Link(5e-6, 2e-10), Link(100e-6, 8e-9)


def hosts(count: int, local: int) -> Topology:
    names = tuple(f"host {index // local}" for index in range(count * local))
    return Topology(names, local, NEAR if local > 1 else None, FAR if count > 1 else None)


@given(n=st.integers(2, 9), numel=st.integers(1, 100_000), name=st.sampled_from(["ring", "doubling", "tree"]))
def test_one_rank_a_host_costs_the_textbooks_alpha_beta_time(n: int, numel: int, name: str) -> None:
    plan = find_algorithm(f"all_reduce/{name}")
    # Rounds of one message a rank, each way.
    expected = alpha_beta_seconds(plan, n, numel, bandwidth=1 / FAR.beta, latency=FAR.alpha)
    assert predict_seconds(plan, numel, hosts(n, 1)) == pytest.approx(expected)


def test_small_buffers_take_few_messages_and_large_ones_few_bytes() -> None:
    assert choose("all_reduce", 64, hosts(8, 1)).algorithm == "doubling"
    assert choose("all_reduce", 64 << 20, hosts(8, 1)).algorithm in ("ring", "halving", "direct")
    assert choose("broadcast", 64, hosts(8, 1)).algorithm == "tree"
    assert choose("broadcast", 64 << 20, hosts(8, 1)).algorithm == "ring"


def test_several_ranks_a_host_send_hierarchically_what_is_large() -> None:
    choice = choose("all_reduce", 25 << 20, hosts(2, 2))
    assert choice.algorithm == "hierarchical"
    costs = dict(choice.costs)
    # Half of what the flat one sends crosses a wire that the ranks of a host share.
    assert costs["direct"] / costs["hierarchical"] == pytest.approx(2, rel=0.1)


def test_the_least_bytes_are_what_the_schedule_counts() -> None:
    assert choose("all_reduce", 64, hosts(8, 1), bandwidth_optimal=True).algorithm in ("direct", "ring", "halving")


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_every_algorithm_is_compared_and_the_table_says_why(collective: str) -> None:
    choice = choose(collective, 1 << 20, hosts(1, 4))
    assert {name for name, _ in choice.costs} == set(ALGORITHMS[collective])
    assert [cost for _, cost in choice.costs] == sorted(cost for _, cost in choice.costs)
    said = str(choice)
    assert f"{collective} of 1,048,576 bytes, 4 ranks on 1 host" in said
    assert "measured inside a host: 5.0 us a message, 5.00 GB/s" in said
    assert f"  {choice.algorithm} " in said.split("<- chosen")[0].splitlines()[-1]


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of broadcast"):
        choose("allreduce", 8, hosts(2, 1))


MEASURED = json.loads((Path(__file__).parents[3] / "docs/results/comm.json").read_text())


def measured_seconds() -> dict[tuple[str, int], dict[str, float]]:
    """What each algorithm took in shared memory at best, by collective and bytes; with two ranks some are one plan."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in MEASURED["rows"]:
        # A barrier has no bytes to choose by.
        if row["bytes"] and (row["transport"], row["ranks"], row["dtype"]) == ("shared memory", 2, "float32"):
            found.setdefault((row["op"], row["bytes"]), {})[row["algorithm"]] = 1e-6 * (
                row["time_us"] - row["spread_us"]
            )
    return found


@pytest.mark.parametrize("alpha", [1e-6, 5e-6, 1e-5])
def test_what_is_chosen_inside_a_host_was_measured_to_be_about_as_fast_as_any(alpha: float) -> None:
    seconds = measured_seconds()
    assert {collective for collective, _ in seconds} == set(ALGORITHMS) - {"barrier"}
    # A byte costs from what it does in cache to what it does in memory.
    betas = [1e-6 * row["time_us"] / row["bytes"] for row in MEASURED["copies"]]
    slow = {
        (collective, size, beta, choice.algorithm): times
        for (collective, size), times in seconds.items()
        for beta in (min(betas), max(betas))
        for choice in [choose(collective, size, Topology(("h", "h"), 2, Link(alpha, beta), None))]
        if times[choice.algorithm] > 1.5 * min(times.values())
    }
    assert not slow
