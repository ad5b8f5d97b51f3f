"""Ranks that launched the same tell the same number, others another."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from paceline.executor.launch_hash import LaunchHash

LAUNCHES = st.lists(st.tuples(st.sampled_from(("gather", "reduce")), st.sampled_from(("bucket 0", "bucket 1", "kept"))))


def taken(launches: list[tuple[str, str]]) -> int:
    tells = LaunchHash()
    for stream, target in launches:
        tells.add(stream, target)
    return tells.take()


@given(LAUNCHES)
def test_order_counts_on_each_stream_and_not_between_them(launches: list[tuple[str, str]]) -> None:
    by_stream = sorted(launches, key=lambda launch: launch[0])
    assert taken(launches) == taken(by_stream) < 1 << 20


def test_another_order_on_a_stream_is_another_number() -> None:
    targets = ("bucket 0", "bucket 1", "bucket 2")
    assert len({taken([("reduce", target) for target in order]) for order in permutations(targets)}) == 6


def test_it_begins_anew_when_it_was_taken() -> None:
    tells = LaunchHash()
    tells.add("reduce", "bucket 0")
    first = tells.take()
    assert tells.take() == 0
    tells.add("reduce", "bucket 0")
    assert tells.take() == first
