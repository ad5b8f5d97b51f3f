from __future__ import annotations

import pytest

from paceline.bench.network.rows import make_row, table, wire_seconds
from paceline.bench.network.turns import Timed

GBIT = 125e6


def test_the_wire_bound_is_that_of_the_bytes_a_host_must_send() -> None:
    assert wire_seconds(2, 10 * 2**20, GBIT) == pytest.approx(0.0839, abs=1e-4)
    assert wire_seconds(4, 100e6, GBIT) == pytest.approx(1.2)
    # The ring's 1.8 M of 10 hosts, and 1.998 M of 1000.
    assert wire_seconds(10, 1, 1) == pytest.approx(1.8)
    assert wire_seconds(1000, 1, 1) == pytest.approx(1.998)


def test_a_ratio_is_to_the_larger_of_computing_and_wire_in_the_same_round() -> None:
    timed = Timed("model", "paceline", "flat", GBIT, (1.5, 3.0, 2.4), 130e6, 3.6, compute=(0.5, 2.0, 1.2))
    row = make_row("systems", timed, 2, 1, GBIT, cores=2)
    assert (row.median_ms, row.compute_ms, row.wire_ms) == (2400, 1200, pytest.approx(1000))
    assert row.ratio == pytest.approx(1.5)
    # Ratios 1.5, 1.5 and 2, whose quartiles are 1.5 and 1.75.
    assert row.ratio_spread == pytest.approx(0.125)
    assert row.gbit == pytest.approx(1.0)
    assert row.cores_ms == pytest.approx(1800)
    alone = make_row("systems", Timed("model", "one process", "", 0, (0.5, 2.0), 0, 0, (0.5, 2.0)), 2, 1, GBIT, 2)
    assert (alone.ratio, alone.wire_ms) == (1, 0)


def test_a_table_has_a_line_a_row_under_its_case() -> None:
    rows = [
        make_row("all-reduce", Timed(case, "Gloo", "dist.all_reduce", size, (0.2, 0.2), size, 0.1), 2, 2, GBIT, 4)
        for case, size in (("1 MiB", 2**20), ("10 MiB", 10 * 2**20))
    ]
    lines = table(rows).splitlines()
    assert lines[0].startswith("all-reduce, 2 hosts with 2 ranks each, 1.00 Gbit/s; ratio to the wire's least")
    assert lines[1].split() == ["ms", "±", "compute", "wire", "cores", "ratio", "±", "sent", "MB"]
    assert (lines[2], lines[4]) == ("1 MiB", "10 MiB")
    assert [line.split()[2:] for line in (lines[3], lines[5])] == [
        ["200.00", "0.00", "0.00", "8.39", "25.00", "23.842", "0.000", "1.05"],
        ["200.00", "0.00", "0.00", "83.89", "25.00", "2.384", "0.000", "10.49"],
    ]
