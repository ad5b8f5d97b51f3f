from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.comm.sizes import bus_bandwidth, element_counts, parse_size, per_rank_count, size_text
from paceline.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1k", 1024), ("64K", 65536), ("25M", 26214400), ("1.5m", 1572864), ("1G", 2**30), (" 8 ", 8)],
)
def test_sizes_are_powers_of_1024_as_in_nccl_tests(text: str, size: int) -> None:
    assert parse_size(text, "--min") == size


@pytest.mark.parametrize("text", ["", "k", "1kb", "-1", "0", "1e3", "1 k M", "0.5"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--max: expected a size such as 4096, 1k, 25M or 1G"):
        parse_size(text, "--max")


@given(st.integers(1, 2**50))
def test_the_text_of_a_size_reads_as_that_size(size: int) -> None:
    assert parse_size(size_text(size), "--min") == size


def test_text_is_short() -> None:
    assert [size_text(size) for size in (100, 1024, 26214400, 2**31)] == ["100", "1k", "25M", "2G"]


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(2, 10), st.sampled_from([2, 4, 8]), st.integers(2, 9))
def test_buffers_hold_whole_shards_and_grow_up_to_the_largest_size(
    smallest: int, more: int, factor: int, itemsize: int, ranks: int
) -> None:
    largest = smallest + more
    counts = element_counts(smallest, largest, factor, itemsize, ranks)
    assert counts == sorted(set(counts))
    assert all(count % ranks == 0 for count in counts)
    assert counts[-1] * itemsize <= max(largest, itemsize * ranks)
    assert counts[0] * itemsize <= max(smallest, itemsize * ranks) < (counts[0] + ranks) * itemsize
    assert largest // factor < max(counts[-1] + ranks, ranks) * itemsize


def test_a_sweep() -> None:
    assert element_counts(1024, 16384, 4, 4, 2) == [256, 1024, 4096]
    # Sizes below an element for each rank are one.
    assert element_counts(1, 16, 2, 4, 3) == [3]


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_gather", 3 / 4),
        ("all_to_all", 3 / 4),
        ("scatter", 3 / 4),
        ("gather", 3 / 4),
        ("broadcast", 1),
        ("reduce", 1),
        ("barrier", 0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(op: str, factor: float) -> None:
    assert bus_bandwidth(op, 4 * 10**9, 2.0, 4) == pytest.approx(2.0 * factor)


def test_counts_are_those_of_a_rank() -> None:
    assert per_rank_count("all_reduce", 1024, 4) == 1024
    assert per_rank_count("broadcast", 1024, 4) == 1024
    assert per_rank_count("all_gather", 1024, 4) == 256
    assert per_rank_count("reduce_scatter", 1024, 4) == 256
