"""Whoever asks a launch to stop gets it, whatever its workers are at."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from paceline.launch.stop import TOGETHER_SECONDS
from tests.launch.jobs import job, nothing_is_left, wait_for


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_stop_is_passed_on_and_workers_may_take_their_time(tmp_path: Path, sent: signal.Signals, status: int) -> None:
    body = """
    with StopRequest() as stop:
        note("ready")
        while not stop.received:
            time.sleep(0.01)
        if rank == 0 and stop.received == signal.SIGINT:
            # Longer than a failed job is given: the other rank is gone by then.
            time.sleep(3.5)
        note("saved")
        return 128 + stop.received
    """
    with job(tmp_path, body) as started:
        wait_for(started, tmp_path / "ready-0", tmp_path / "ready-1")
        started.process.send_signal(sent)
        assert started.finish()[0] == status
        nothing_is_left(tmp_path, started)
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


@pytest.mark.full
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_request_ends_at_once(tmp_path: Path, sent: signal.Signals, status: int) -> None:
    body = """
    with StopRequest() as stop:
        note("ready")
        while True:
            time.sleep(0.01)
            if stop.received:
                note("asked")
    """
    with job(tmp_path, body) as started:
        wait_for(started, tmp_path / "ready-0", tmp_path / "ready-1")
        started.process.send_signal(sent)
        wait_for(started, tmp_path / "asked-0", tmp_path / "asked-1")
        time.sleep(2 * TOGETHER_SECONDS)
        started.process.send_signal(sent)
        ended, _, err = started.finish()
        nothing_is_left(tmp_path, started)
    assert ended == status
    assert "failed" not in err


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_while_workers_start_ends_them_though_one_is_deaf_and_one_stopped(
    tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    body = """
    if rank == 0:
        with StopRequest():
            note("ready")
            time.sleep(60)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    note("ready")
    time.sleep(60)
    """
    with job(tmp_path, body, workers=3) as started:
        wait_for(started, *(tmp_path / f"ready-{rank}" for rank in range(3)))
        os.kill(started.rank(2), signal.SIGSTOP)
        started.process.send_signal(sent)
        ended, _, err = started.finish()
        nothing_is_left(tmp_path, started)
    assert ended == status
    assert "failed" not in err and "Traceback" not in err


def test_a_stop_while_a_worker_starts_lets_it_clean_up(tmp_path: Path) -> None:
    body = """
    def end(*_):
        raise SystemExit(143)
    signal.signal(signal.SIGTERM, end)
    note("ready")
    try:
        time.sleep(60)
    finally:
        note("cleaned")
    """
    with job(tmp_path, body) as started:
        wait_for(started, tmp_path / "ready-0", tmp_path / "ready-1")
        started.process.send_signal(signal.SIGINT)
        assert started.finish()[0] == 130
    assert (tmp_path / "cleaned-0").exists() and (tmp_path / "cleaned-1").exists()


def test_a_worker_that_was_stopped_goes_on_to_grant_a_stop(tmp_path: Path) -> None:
    body = """
    with StopRequest() as stop:
        note("ready")
        while not stop.received:
            time.sleep(0.01)
        note("saved")
        return 128 + stop.received
    """
    with job(tmp_path, body) as started:
        wait_for(started, tmp_path / "ready-0", tmp_path / "ready-1")
        os.kill(started.rank(1), signal.SIGSTOP)
        started.process.send_signal(signal.SIGINT)
        assert started.finish()[0] == 130
        nothing_is_left(tmp_path, started)
    assert (tmp_path / "saved-1").exists()
