"""What `paceline bench comm` found: rows, their tables, and lines fitted to them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.bench.comm.measure import Timing
from paceline.bench.comm.sizes import SUMS, algorithm_bandwidth, bus_bandwidth, per_rank_count
from paceline.comm.profile import Fit, fit
from paceline.measuring.results import half_spread


@dataclass(frozen=True)
class CommRow:
    """One system, one collective, one size. Names and units are those of nccl-tests, but for bytes as "bytes"."""

    op: str
    ranks: int
    transport: str
    algorithm: str
    bytes: int
    count: int
    dtype: str
    redop: str
    time_us: float
    """Median over rounds of the time of one run on the slowest rank."""
    algbw: float
    """GB/s; 0 of a barrier, as its bytes and count are."""
    busbw: float
    """GB/s; likewise."""
    wrong: int
    """Elements that differ from the reference, over all ranks; of a barrier, how often one left before all had come."""
    spread_us: float
    """Half the distance between the quartiles of the time."""
    buffers: str = ""
    """Of libraries that can be called with one buffer or with two, which was faster."""


@dataclass(frozen=True)
class CopyRow:
    """Every rank copying as many bytes as a collective is over, at once: the bound that memory sets."""

    op: str
    """The collective in whose rounds it was measured."""
    ranks: int
    bytes: int
    time_us: float
    spread_us: float
    gb_per_second: float
    """Of one rank."""


@dataclass(frozen=True)
class FittedRow:
    """The line through one system's times of one collective."""

    op: str
    ranks: int
    transport: str
    algorithm: str
    dtype: str
    fit: Fit


def make_rows(op: str, ranks: int, dtype: str, itemsize: int, numel: int, timings: Sequence[Timing]) -> list[CommRow]:
    """A row for each system; of ways to call one library, the faster."""
    rows: dict[tuple[str, str], CommRow] = {}
    for timing in timings:
        name = timing.system.algorithm
        if name == "copy":
            continue
        seconds, size = statistics.median(timing.seconds), numel * itemsize
        row = CommRow(
            op,
            ranks,
            timing.system.library,
            "own" if name.startswith("*") else name,
            size,
            per_rank_count(op, numel, ranks),
            dtype,
            "sum" if op in SUMS else "none",
            seconds * 1e6,
            algorithm_bandwidth(size, seconds),
            bus_bandwidth(op, size, seconds, ranks),
            timing.wrong,
            half_spread(timing.seconds) * 1e6,
            name.removeprefix("*") if name.startswith("*") else "",
        )
        key = (row.transport, row.algorithm)
        # A way that gives wrong results is no better for being fast; it is shown if it is the only one.
        rows[key] = min(rows.get(key, row), row, key=lambda each: (each.wrong > 0, each.time_us))
    return list(rows.values())


def make_copy_row(op: str, ranks: int, size: int, timings: Sequence[Timing]) -> CopyRow | None:
    """The copy's row, if it was measured."""
    for timing in timings:
        if timing.system.algorithm == "copy":
            seconds = statistics.median(timing.seconds)
            spread = half_spread(timing.seconds) * 1e6
            return CopyRow(op, ranks, size, seconds * 1e6, spread, algorithm_bandwidth(size, seconds))
    return None


def fit_rows(rows: Sequence[CommRow]) -> list[FittedRow]:
    """A line for each system and collective with at least three sizes."""
    series: dict[tuple[str, int, str, str, str], list[CommRow]] = {}
    for row in rows:
        series.setdefault((row.op, row.ranks, row.transport, row.algorithm, row.dtype), []).append(row)
    return [
        FittedRow(*key, fit([row.bytes for row in found], [row.time_us * 1e-6 for row in found]))
        for key, found in series.items()
        if len({row.bytes for row in found}) >= 3
    ]


def format_rows(rows: Sequence[CommRow]) -> str:
    """The table of nccl-tests, with what was run before its columns."""
    heads = ["op", "ranks", "transport", "algorithm", "size(B)", "count", "type", "redop"]
    heads += ["time(us)", "algbw(GB/s)", "busbw(GB/s)", "#wrong", "±(us)"]
    return format_table(
        heads,
        (
            (
                *(row.op, str(row.ranks), row.transport, " ".join(filter(None, (row.algorithm, row.buffers)))),
                *(str(row.bytes), str(row.count), row.dtype, row.redop),
                f"{row.time_us:.2f}",
                *(f"{width:.3f}" if row.bytes else "-" for width in (row.algbw, row.busbw)),
                str(row.wrong),
                f"{row.spread_us:.2f}",
            )
            for row in rows
        ),
        left=4,
    )


def format_copies(copies: Sequence[CopyRow], rows: Sequence[CommRow]) -> str:
    """The copy bound at each size, and the fastest system of every transport next to it.

    An all-reduce must read and write what a copy does, so it shows which share of the bound it reaches: the bound's
    time / its time.
    """
    transports = list(dict.fromkeys(row.transport for row in rows))
    lines = []
    for copy in copies:
        cells = [str(copy.bytes), f"{copy.time_us:.2f}", f"{copy.gb_per_second:.2f}"]
        for transport in transports:
            found = [row for row in rows if (row.transport, row.bytes) == (transport, copy.bytes)]
            best = min(found, key=lambda row: row.time_us, default=None)
            share = f" {copy.time_us / best.time_us:4.0%}" if best is not None and best.op == "all_reduce" else ""
            cells.append("" if best is None else f"{best.time_us:.2f}{share}")
        lines.append(cells)
    return format_table(["size(B)", "copy(us)", "copy(GB/s)", *transports], lines, left=0)


def format_fits(fits: Sequence[FittedRow]) -> str:
    """Fitted alpha and beta, with standard errors and the worst relative error of the fit."""
    heads = ["op", "ranks", "transport", "algorithm", "alpha(us)", "±", "beta(ps/B)", "±", "worst"]
    return format_table(
        heads,
        (
            (
                *(row.op, str(row.ranks), row.transport, row.algorithm),
                *(f"{row.fit.alpha * 1e6:.2f}", f"{row.fit.alpha_error * 1e6:.2f}"),
                *(f"{row.fit.beta * 1e12:.1f}", f"{row.fit.beta_error * 1e12:.1f}"),
                f"{row.fit.worst_error:.0%}",
            )
            for row in fits
        ),
        left=4,
    )


def format_table(heads: Sequence[str], lines: Iterable[Sequence[str]], left: int) -> str:
    """Aligned columns, the first `left` to the left."""
    cells = [heads, *lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if index < left else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
