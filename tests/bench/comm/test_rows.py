from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.comm.rows import CommRow, CopyRow, fit_rows, format_copies, format_fits, format_rows

ROW = CommRow("all_reduce", 2, "tcp", "ring", 1024, 256, "float32", "sum", 20.0, 0.0512, 0.0512, 0, 0.25)
SIZES = (1024, 4096, 16384)


def rows(algorithm: str = "ring") -> list[CommRow]:
    return [replace(ROW, algorithm=algorithm, bytes=size, time_us=10 + 1e-3 * size) for size in SIZES]


def test_columns_are_those_of_nccl_tests_behind_what_was_run() -> None:
    heads, line = format_rows([replace(ROW, buffers="in place", wrong=3)]).splitlines()
    assert heads.split() == [
        *("op", "ranks", "transport", "algorithm"),
        *("size(B)", "count", "type", "redop", "time(us)", "algbw(GB/s)", "busbw(GB/s)", "#wrong"),
        "±(us)",
    ]
    assert " ".join(line.split()) == "all_reduce 2 tcp ring in place 1024 256 float32 sum 20.00 0.051 0.051 3 0.25"
    assert line.index("1024") + 4 == heads.index("size(B)") + 7


def test_a_barrier_has_a_time_and_no_bandwidths() -> None:
    barrier = replace(ROW, op="barrier", algorithm="tree", bytes=0, count=0, redop="none", algbw=0.0, busbw=0.0)
    _, line = format_rows([barrier]).splitlines()
    assert " ".join(line.split()) == "barrier 2 tcp tree 0 0 float32 none 20.00 - - 0 0.25"


def test_each_system_and_collective_has_a_line_of_its_own() -> None:
    found = fit_rows([*rows(), *rows("tree"), *[replace(row, op="reduce") for row in rows()]])
    assert [(row.op, row.algorithm) for row in found] == [
        ("all_reduce", "ring"),
        ("all_reduce", "tree"),
        ("reduce", "ring"),
    ]
    assert found[0].fit.alpha == pytest.approx(10e-6)
    assert found[0].fit.beta == pytest.approx(1e-9)
    _, line, *_ = format_fits(found).splitlines()
    assert line.split() == ["all_reduce", "2", "tcp", "ring", "10.00", "0.00", "1000.0", "0.0", "0%"]


def test_two_sizes_have_no_line() -> None:
    assert fit_rows(rows()[:2]) == []


def test_the_copy_stands_beside_the_fastest_of_each_transport() -> None:
    copies = [CopyRow("all_reduce", 2, 1024, 5.0, 0.1, 0.2048), CopyRow("all_reduce", 2, 4096, 6.0, 0.1, 0.6827)]
    found = [ROW, replace(ROW, algorithm="tree", time_us=10.0), replace(ROW, transport="gloo", time_us=500.0)]
    heads, first, second = format_copies(copies, found).splitlines()
    assert heads.split() == ["size(B)", "copy(us)", "copy(GB/s)", "tcp", "gloo"]
    assert first.split() == ["1024", "5.00", "0.20", "10.00", "50%", "500.00", "1%"]
    assert second.split() == ["4096", "6.00", "0.68"], "no system could do this size"
    others = format_copies(copies[:1], [replace(row, op="all_gather") for row in found])
    assert "%" not in others, "a copy bounds an all-reduce alone"
