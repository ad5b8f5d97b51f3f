"""A run that is stopped, or of which a process is killed or stopped: what is saved, what is said, and nothing stays."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.quick import full
from tests.train.processes import (
    called,
    metrics,
    new_in_shared_memory,
    paceline,
    program,
    torchrun,
    wait_for_step,
)
from tests.train.test_training import LONG


@pytest.mark.parametrize(
    ("workers", "sent", "status"),
    [("2", signal.SIGINT, 130), full("2", signal.SIGTERM, 143), full("1", signal.SIGTERM, 143)],
)
def test_a_stop_saves_the_weights_says_where_and_they_can_be_sampled(
    nano: list[str], tmp_path: Path, workers: str, sent: signal.Signals, status: int
) -> None:
    with program(paceline("train", *nano, *LONG, "--workers", workers, "--folder", "stopped"), tmp_path) as started:
        wait_for_step(started, tmp_path / "stopped", 3)
        started.process.send_signal(sent)
        code, out, err = started.finish()
        assert not started.alive()
    assert code == status, err
    assert "Traceback" not in err
    stop = re.search(r"stopped after step (\d+); the weights are in stopped", out)
    assert stop is not None and int(stop[1]) == metrics(tmp_path / "stopped")[-1]["step"]
    if sent == signal.SIGTERM:
        return  # one sample is enough
    code, out, err = called(tmp_path, "sample", "stopped", "--prompt", "abc", "--tokens", "5", "--seed", "1")
    assert (code, err) == (0, "")
    assert out.startswith("abc") and len(out) > 4


@pytest.mark.full  # without torch, tests/launch/test_workers.py does so
def test_a_worker_killed_while_training_ends_everything(nano: list[str], tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    (tmp_path / "tmp").mkdir()
    command = paceline("train", *nano, *LONG, "--workers", "2", "--folder", "killed")
    with program(command, tmp_path, {"TMPDIR": str(tmp_path / "tmp")}) as started:
        wait_for_step(started, tmp_path / "killed", 3)
        killed = time.monotonic()
        os.kill(started.rank(1), signal.SIGKILL)
        status, _, err = started.finish()
        assert time.monotonic() - killed < 30
        assert not started.alive()
    assert status == 137
    last = err[err.rindex("rank 1 of 2 failed") :]
    assert "SIGKILL" in last and "Traceback" not in err
    assert not list((tmp_path / "tmp").glob("paceline*"))
    assert not new_in_shared_memory(shared)


@pytest.mark.full
def test_a_stopped_worker_is_named_within_the_limit_with_what_lets_it_go_on(nano: list[str], tmp_path: Path) -> None:
    command = paceline("train", *nano, *LONG, "--workers", "2", "--folder", "halted", "--timeout", "3")
    with program(command, tmp_path) as started:
        wait_for_step(started, tmp_path / "halted", 3)
        stopped = started.rank(1)
        os.kill(stopped, signal.SIGSTOP)
        status, _, err = started.finish()
        assert not started.alive()
    assert status == 1
    # In a collective or in a control message: both name it.
    assert "did not answer" in err and f"process {stopped} is stopped: `kill -CONT {stopped}`" in err


@pytest.mark.full
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_while_ranks_meet_ends_them_all(
    nano: list[str], tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    with program(paceline("train", *nano, *LONG, "--workers", "3"), tmp_path) as started:
        deadline = time.monotonic() + 60
        while len([env for env in started.alive().values() if "RANK" in env]) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # The others come to where they wait for it.
        os.kill(started.rank(1), signal.SIGSTOP)
        time.sleep(6)
        started.process.send_signal(sent)
        ended, _, err = started.finish()
        assert not started.alive()
    assert ended == status
    assert "failed" not in err and "Traceback" not in err


@pytest.mark.full
def test_ctrl_c_under_torchrun_saves_the_weights(nano: list[str], tmp_path: Path) -> None:
    command = torchrun(2, "-m", "paceline", "train", *nano, *LONG, "--folder", "stopped")
    with program(command, tmp_path) as started:
        wait_for_step(started, tmp_path / "stopped", 2)
        # A terminal interrupts the whole group: torchrun and its workers.
        os.killpg(started.process.pid, signal.SIGINT)
        _, out, _ = started.finish()
        started.wait_until_gone(20)
    assert "the weights are in stopped" in out
    assert (tmp_path / "stopped" / "model.safetensors").exists()
