"""`paceline bench comm`: collectives of paceline, Gloo, NCCL and MPI side by side, in the form of nccl-tests."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from paceline.bench.comm.group import Group
from paceline.bench.comm.groups import find_mpi, start_mpi, start_ours
from paceline.bench.comm.measure import measure, systems_for
from paceline.bench.comm.rows import (
    CommRow,
    CopyRow,
    FittedRow,
    fit_rows,
    format_copies,
    format_fits,
    format_rows,
    make_copy_row,
    make_rows,
)
from paceline.bench.comm.sizes import element_counts, parse_size, size_text
from paceline.bench.subject_line import progress
from paceline.comm.profile import Copy, Cost, HardwareProfile, Host, write_profile
from paceline.command_line.json_file import JsonFile
from paceline.command_line.options import Value
from paceline.core.collectives.algorithms import ALGORITHMS
from paceline.core.errors import UserError
from paceline.measuring.results import machine, write_json

Op = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather", "all_to_all", "barrier"
]

OWN = ("shared memory", "tcp", "nccl")
"""The transports that paceline trains over, whose costs a hardware profile holds."""


@dataclass(frozen=True)
class CommBench:
    """Time, bandwidth and correctness of collectives: every transport and algorithm against Gloo, NCCL and MPI."""

    op: tuple[Op, ...] = ("all_reduce", "reduce_scatter", "all_gather")
    """Collectives to measure; a barrier has no size."""
    min: str = "1k"
    """Smallest size, in powers of 1024: 4096, 1k, 25M."""
    max: str = "64M"
    """Largest size."""
    factor: int = 4
    """Each size is so many times the one before."""
    algorithm: tuple[str, ...] = ()
    """Which of paceline's algorithms to run, such as ring; default: all."""
    ranks: int = 2
    """Number of ranks, on this machine."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """What the buffers hold."""
    rounds: int = 9
    """Rounds; in each, every system runs in turn."""
    mpi: Annotated[tuple[str, ...], Value("FOLDER")] = ()
    """Folders with further MPI libraries, besides that of this Python and that on the PATH."""
    json: JsonFile = ""
    """Where to write machine, versions, command and rows; - prints them, and all else goes to stderr."""
    plot: Annotated[str, Value("FILE")] = ""
    """Where to draw time over size: a .svg or a .png."""
    profile: Annotated[str, Value("FILE")] = ""
    """Where to write a hardware profile: what messages and bytes cost on this machine."""


def main(options: CommBench) -> list[CommRow]:
    """Runs the benchmark, prints its tables and writes its files.

    Raises:
        UserError: An option makes no sense, or something is missing that it needs.
    """
    counts = _checked(options)
    dtype = getattr(torch, options.dtype)
    rows: list[CommRow] = []
    copies: list[CopyRow] = []
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack, progress() as report:
        groups: list[Group] = []
        stack.callback(_close, groups)
        report("starting the ranks")
        installations = find_mpi(options.mpi)
        job = (options.ranks, options.dtype, counts[-1])
        groups.append(start_ours(*job))
        missing = groups[0].missing | start_mpi(*job, installations, groups)
        for name, reason in missing.items():
            report("")
            print(f"skipped {name}: {reason}", file=sys.stderr)
        for op in options.op:
            systems = systems_for(op, groups, options.algorithm)
            for numel in counts if op != "barrier" else [0]:
                size = numel * dtype.itemsize

                def told(what: str, op: str = op, size: int = size) -> None:
                    report(f"{op}, {size_text(size)}: {what}" if size else f"{op}: {what}")

                timings = measure(op, numel, systems, options.rounds, failures, told)
                rows += make_rows(op, options.ranks, options.dtype, dtype.itemsize, numel, timings)
                copy = make_copy_row(op, options.ranks, size, timings)
                copies += [] if copy is None else [copy]
            report("")
            _print_op(op, options, rows, copies)
            if options.json:  # each time, so that a run that is cut short leaves what it has
                _write(options, rows, copies, missing | failures)
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    right = [row for row in rows if not row.wrong]
    if len(right) < len(rows):
        print(f"wrong results in {len(rows) - len(right)} of {len(rows)} rows: see #wrong", file=sys.stderr)
    if options.plot and any(row.bytes for row in rows):
        from paceline.bench.comm.plot import draw

        # A barrier's size has no place on an axis of sizes.
        draw([row for row in rows if row.bytes], copies, Path(options.plot))
    if options.profile:
        write_profile(options.profile, hardware_profile(fit_rows(right), copies))
    return rows


def hardware_profile(fits: Sequence[FittedRow], copies: Sequence[CopyRow]) -> HardwareProfile:
    """The profile of this machine: the lines fitted to what paceline trains over, and the copies' fastest times."""
    found = machine()
    host = Host(**{**found, "gpus": tuple(found["gpus"])})
    fastest: dict[int, CopyRow] = {}
    for row in copies:
        fastest[row.bytes] = min(fastest.get(row.bytes, row), row, key=lambda each: each.time_us)
    return HardwareProfile(
        host,
        tuple(Copy(row.ranks, row.bytes, row.time_us * 1e-6) for row in fastest.values()),
        tuple(
            Cost(row.transport, row.op, row.algorithm, row.ranks, row.dtype, row.fit)
            for row in fits
            if row.transport in OWN
        ),
    )


def _checked(options: CommBench) -> list[int]:
    """Numbers of elements to measure.

    Raises:
        UserError: An option makes no sense.
    """
    for name, value, least in (
        ("ranks", options.ranks, 2),
        ("factor", options.factor, 2),
        ("rounds", options.rounds, 1),
    ):
        if value < least:
            raise UserError(f"--{name}: expected {least} or more, got {value}")
    known = dict.fromkeys(name for op in options.op for name in ALGORITHMS[op])
    for name in options.algorithm:
        if name not in known:
            raise UserError(f"--algorithm: expected some of {', '.join(known)}; got {name!r}")
    smallest, largest = parse_size(options.min, "--min"), parse_size(options.max, "--max")
    if smallest > largest:
        raise UserError(f"--min: expected at most --max {options.max}, got {options.min}")
    if options.plot:
        if not options.plot.endswith((".svg", ".png")):
            raise UserError(f"--plot: expected a file that ends in .svg or .png, got {options.plot!r}")
        if set(options.op) == {"barrier"}:
            raise UserError("--plot: draws time over size, which a barrier has none of; add another --op")
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise UserError("--plot: needs matplotlib: pip install 'paceline[plot]'") from error
    for path in (options.json, options.plot, options.profile):
        # Before minutes are spent on what could not be kept.
        if path and not Path(path).absolute().parent.is_dir():
            raise UserError(f"{path}: expected a file in a folder that exists; make {Path(path).parent} first")
    itemsize = getattr(torch, options.dtype).itemsize
    return element_counts(smallest, largest, options.factor, itemsize, options.ranks)


def _close(groups: Sequence[Group]) -> None:
    for group in groups:
        group.close()


def _print_op(op: str, options: CommBench, rows: Sequence[CommRow], copies: Sequence[CopyRow]) -> None:
    mine = [row for row in rows if row.op == op]
    if not mine:
        return
    print(f"\n{op}, {options.ranks} ranks, {options.dtype}: medians of {options.rounds} rounds")
    faster = "; of an MPI's calls with one buffer and with two, the faster" if any(row.buffers for row in mine) else ""
    print(f"± half the quartile distance{faster}")
    print(format_rows(mine))
    bounds = [copy for copy in copies if copy.op == op]
    if bounds:
        print(f"\nTime in us of each transport's fastest, beside {options.ranks} ranks copying as many bytes at once")
        if op == "all_reduce":
            print("%: the copy's time / the all-reduce's")
        print(format_copies(bounds, mine))
    fits = fit_rows(mine)
    if fits:
        print("\nFitted: time = alpha + beta * size(B), least relative error; ± standard error; worst of all sizes")
        print(format_fits(fits))
    sys.stdout.flush()


def _write(options: CommBench, rows: Sequence[CommRow], copies: Sequence[CopyRow], skipped: dict[str, str]) -> None:
    extra: dict[str, Any] = {
        "rounds": options.rounds,
        "skipped": skipped,
        "copies": [asdict(copy) for copy in copies],
        "fits": [asdict(row) for row in fit_rows(rows)],
    }
    write_json(options.json, rows, extra)
