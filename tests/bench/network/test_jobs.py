"""Experiments on real hosts, small ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from paceline.bench import cli
from paceline.bench.network.hosts import Hosts
from paceline.bench.network.jobs import JobFailed, run_job
from paceline.bench.network.rank import DDP, SHAPES, SIZES, Job
from paceline.bench.network.turns import Timed
from paceline.core.strategy import SYSTEMS
from paceline.models.flops import parameter_count
from tests.bench.network.test_hosts import marked, needs_hosts

__all__ = ["needs_hosts"]

GBIT = 125e6


@pytest.mark.full
def test_all_reduces_are_timed_beside_the_wire_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    command = ["network", "--gbit", "2", "--experiments", "all-reduce", "--rounds", "2", "--json", str(file)]
    assert cli.main(command) == 0
    shown = capsys.readouterr()
    assert "all-reduce: a link of 2 Gbit/s carries" in shown.out
    assert "all-reduce: 25 MiB" in shown.err
    written = json.loads(file.read_text())
    assert set(written) == {"machine", "command", "links", "rows"}
    rows = written["rows"]
    assert [row["case"] for row in rows[::2]] == list(SIZES)
    assert {(row["system"], row["hosts"], row["ranks_per_host"]) for row in rows} == {
        ("Gloo", 2, 1),
        ("paceline", 2, 1),
    }
    for row in rows:
        size = SIZES[row["case"]]
        assert row["wire_ms"] == pytest.approx(size / written["links"]["all-reduce"]["rate"] * 1e3)
        # Every byte crossed the wire, no faster than it lets them but for the credit of a millisecond.
        assert row["median_ms"] > 0.97 * size * 8 / 2e9 * 1e3 - 1
        assert size < row["sent_bytes"] < 1.05 * size + 5000


@pytest.mark.full
def test_systems_train_a_model_chosen_for_the_wire() -> None:
    with Hosts(2, 1.0) as hosts:
        job = Job("systems", 2, 1, GBIT, rounds=2, step_seconds=0.015)
        timed = [Timed(**one) for one in run_job(hosts, job, lambda words: None)]
    size = 4 * parameter_count(SHAPES[0])
    assert [one.setting for one in timed] == ["no communication", *SYSTEMS, DDP.split(": ")[1]]
    assert all(len(one.seconds) == 2 and one.compute == timed[0].seconds for one in timed)
    assert timed[0].sent < 5000, "computing alone sends nothing but the barrier"
    assert [one.size for one in timed] == [0] + [size] * (len(timed) - 1)
    for one in timed[1:]:
        assert size < one.sent < 1.2 * size, one.setting
        # Two ranks, each of which takes a core at most for its computing, and some for its messages.
        assert timed[0].processor / 2 < one.processor < 4 * max(one.seconds), one.setting


@pytest.mark.full
def test_a_job_that_fails_shows_why() -> None:
    with Hosts(2, 1.0) as hosts, pytest.raises(JobFailed, match=r"host 0:[\s\S]*KeyError: 'no such thing'"):
        run_job(hosts, Job("no such thing", 2, 1, GBIT, 2), lambda words: None)


@pytest.mark.full
def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "paceline", "bench", "network", "--experiments", "all-reduce", "--rounds", "1000"]
    environment = {**os.environ, "PACELINE_TEST_MARK": mark, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as program:
        assert program.stderr is not None
        assert b"all-reduce: 100 KiB" in program.stderr.readline()
        assert len(marked(mark)) > 6
        program.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked(mark) == []
    assert list(tmp_path.iterdir()) == []
