"""The whole command, on 2 ranks: everything that this machine has beside each other, and all files written."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from paceline.bench import cli
from paceline.bench.comm import measure
from paceline.bench.comm.command import CommBench, Op, main
from paceline.bench.comm.groups import find_mpi
from paceline.comm.profile import read_profile
from paceline.core.collectives.algorithms import ALGORITHMS
from paceline.core.errors import UserError

OPS = get_args(Op)
SIZES = [1024, 4096, 16384]
MOVING = [op for op in OPS if op != "barrier"]
"""Operations that have sizes."""


@dataclass
class Done:
    folder: Path
    printed: str
    progress: str
    result: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("comm")
    plot = str(folder / "plot.svg") if importlib.util.find_spec("matplotlib") else ""
    files = {"json": str(folder / "json.json"), "profile": str(folder / "profile.json"), "plot": plot}
    printed, progress = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(progress):
        # What is tested is that it runs, not that its times are good.
        patch.setattr(measure, "TURN_SECONDS", 1e-3)
        patch.setattr(measure, "FEWEST", 2)
        main(CommBench(op=OPS, max="16k", rounds=2, **files))
    result = json.loads((folder / "json.json").read_text())
    return Done(folder, printed.getvalue(), progress.getvalue(), result)


@pytest.mark.full
def test_every_collective_of_every_system_is_right(done: Done) -> None:
    assert set(OPS) == ALGORITHMS.keys()
    rows = done.result["rows"]
    assert {row["op"] for row in rows} == set(OPS)
    for op in OPS:
        for transport in ("shared memory", "tcp"):
            found = {row["algorithm"] for row in rows if (row["op"], row["transport"]) == (op, transport)}
            assert found == set(ALGORITHMS[op])
        assert [row["bytes"] for row in rows if (row["op"], row["transport"]) == (op, "gloo")] == (
            SIZES if op in MOVING else [0]
        )
    for row in rows:
        assert row["wrong"] == 0, row
        assert row["time_us"] > 0
        assert row["algbw"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)
        assert (row["ranks"], row["dtype"]) == (2, "float32")
    assert not [line for line in done.progress.splitlines() if line.startswith("failed")]


@pytest.mark.full
def test_mpi_runs_beside_the_others_or_is_skipped_visibly(done: Done) -> None:
    transports = {row["transport"] for row in done.result["rows"]}
    if importlib.util.find_spec("mpi4py") is None:
        assert "skipped MPI: mpi4py is not installed: pip install" in done.progress
    elif not find_mpi([]):
        assert "skipped MPICH: not among those that ran; to get it: pip install" in done.progress
    else:
        assert any("MPI" in name for name in transports)
    skipped = done.result["skipped"]
    assert all(f"skipped {name}: {reason}" in done.progress for name, reason in skipped.items())
    assert "nccl" in transports or "needs a GPU for each of 2 ranks" in skipped["nccl"]


def test_machine_command_copies_and_fits_are_kept(done: Done) -> None:
    result = done.result
    assert result["machine"]["cores"] > 0
    assert result["command"].split()[0] == "paceline"
    assert [(copy["op"], copy["bytes"]) for copy in result["copies"]] == [(op, size) for op in MOVING for size in SIZES]
    series = {(row["op"], row["transport"], row["algorithm"]) for row in result["rows"] if row["op"] in MOVING}
    assert {(fit["op"], fit["transport"], fit["algorithm"]) for fit in result["fits"]} == series
    for heading in ("all_reduce, 2 ranks, float32: medians of 2 rounds", "copy(GB/s)", "beta(ps/B)"):
        assert heading in done.printed


def test_a_barrier_has_one_row_of_each_system_and_no_copy_beside_it(done: Done) -> None:
    rows = done.result["rows"]
    found = [row for row in rows if row["op"] == "barrier"]
    assert {row["transport"] for row in found} == {row["transport"] for row in rows}, "MPI's too, where it runs"
    assert len(found) == len({(row["transport"], row["algorithm"]) for row in found})
    for row in found:
        assert row.keys() == rows[0].keys()
        assert (row["bytes"], row["count"], row["redop"], row["algbw"], row["busbw"]) == (0, 0, "none", 0, 0)
    table = done.printed[done.printed.index("\nbarrier, 2 ranks") :]
    assert "copy(us)" not in table
    assert "Fitted" not in table


def test_the_profile_holds_what_training_can_use(done: Done) -> None:
    profile = read_profile(done.folder / "profile.json")
    fits = {(fit["op"], fit["transport"], fit["algorithm"]): fit["fit"] for fit in done.result["fits"]}
    assert {cost.transport for cost in profile.costs} - {"nccl"} == {"shared memory", "tcp"}
    for cost in profile.costs:
        assert cost.fit.alpha == fits[cost.collective, cost.transport, cost.algorithm]["alpha"]
    assert profile.host.cores == done.result["machine"]["cores"]
    assert [copy.bytes for copy in profile.copies] == SIZES
    fastest = min(copy["time_us"] for copy in done.result["copies"] if copy["bytes"] == 4096)
    assert profile.copies[1].seconds == pytest.approx(fastest * 1e-6)


def test_the_chart_shows_every_collective(done: Done) -> None:
    pytest.importorskip("matplotlib")
    text = (done.folder / "plot.svg").read_text()
    assert all(f"<!-- {op}, 2 ranks, float32 -->" in text for op in MOVING)
    assert "barrier" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CommBench(min="big"), "--min: expected a size such as"),
        (CommBench(max="0"), "--max: expected a size such as"),
        (CommBench(min="2M", max="1M"), "--min: expected at most --max 1M, got 2M"),
        (CommBench(factor=1), "--factor: expected 2 or more, got 1"),
        (CommBench(ranks=1), "--ranks: expected 2 or more, got 1"),
        (CommBench(rounds=0), "--rounds: expected 1 or more, got 0"),
        (CommBench(algorithm=("rign",)), r"--algorithm: expected some of direct, ring, .*; got 'rign'"),
        (CommBench(op=("scatter",), algorithm=("ring",)), r"expected some of server, tree; got 'ring'"),
        (CommBench(plot="out.pdf"), r"--plot: expected a file that ends in \.svg or \.png, got 'out\.pdf'"),
        (CommBench(op=("barrier",), plot="out.svg"), "--plot: draws time over size, which a barrier has none of"),
        (CommBench(json="none/out.json"), "none/out.json: expected a file in a folder that exists; make none first"),
        (CommBench(mpi=("none",)), "--mpi: expected a folder with bin/mpiexec"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_starts(options: CommBench, message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(options)


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["comm", "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in ("op", "min", "max", "factor", "algorithm", "profile", "mpi"))


def with_mark(mark: str) -> list[int]:
    """Processes that have a mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            marked = mark.encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if marked and (folder / "cmdline").read_bytes():
            found.append(int(folder.name))
    return found


@pytest.mark.full
def test_no_process_stays_after_ctrl_c() -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "paceline", "bench", "comm", "--min", "1M", "--max", "1M", "--rounds", "100000"]
    environment = {**os.environ, "PACELINE_TEST_MARK": mark}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("all_reduce"):
                break
        assert len(with_mark(mark)) > 2
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        # Who is in a hurry presses twice.
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    assert with_mark(mark) == []
