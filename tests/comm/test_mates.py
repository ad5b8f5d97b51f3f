"""Signals to the processes of other ranks: to no other process, and to none that would not survive one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.comm.mates import Mates, process

ROOT = str(Path(__file__).parents[2])
SLEEPS = "print('ready', flush=True); import time; time.sleep(1000)"
ANSWERS = f"""
import sys
from paceline.comm.mates import answer_signals

answer_signals()

def wait_for_a_disk():
    {SLEEPS}

wait_for_a_disk()
"""


def started(code: str) -> subprocess.Popen[str]:
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ROOT},
    )
    assert other.stdout is not None and other.stdout.readline() == "ready\n"
    return other


@pytest.fixture
def answering() -> Iterator[subprocess.Popen[str]]:
    with started(ANSWERS) as other:
        yield other
        other.kill()


def test_a_process_of_the_job_prints_its_stacks_at_the_signal(answering: subprocess.Popen[str]) -> None:
    host, own = process()
    mates = Mates(0, [(host, own), (host, answering.pid)])
    mates.shake([0, 1])
    mates.shake([1])
    mates.close()
    assert answering.stderr is not None
    assert "Current thread" in answering.stderr.readline()
    assert answering.stderr.readline().endswith("in wait_for_a_disk\n")
    assert answering.poll() is None


def test_a_process_that_would_be_ended_by_the_signal_gets_none() -> None:
    host, own = process()
    with started(SLEEPS) as other:
        mates = Mates(0, [(host, own), (host, other.pid)])
        mates.shake([1])
        mates.close()
        other.send_signal(signal.SIGTERM)
        assert other.wait(60) == -signal.SIGTERM


def test_a_process_on_another_host_is_not_one_here(answering: subprocess.Popen[str]) -> None:
    host, own = process()
    mates = Mates(0, [(host, own), ("another host", answering.pid)])
    mates.shake([1])
    mates.close()
    answering.kill()
    assert answering.stderr is not None and answering.stderr.read() == ""


def test_stopped_processes_are_named(answering: subprocess.Popen[str]) -> None:
    host, own = process()
    mates = Mates(0, [(host, own), (host, answering.pid)])
    assert mates.stopped() == []
    answering.send_signal(signal.SIGSTOP)
    while not (told := mates.stopped()):
        pass
    assert told == [f"rank 1's process {answering.pid} is stopped: `kill -CONT {answering.pid}` lets it go on"]
    mates.close()
