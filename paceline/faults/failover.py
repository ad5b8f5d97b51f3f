"""Workers that are lost while others go on, with `--spares` and `--min-workers`."""

from __future__ import annotations

import os
import random
import signal
import subprocess

from paceline.faults.outcome import Job, jobs
from paceline.faults.training import FaultError, Training

LOSSES = 20
MORE_STEPS = 1500
"""Steps of a training that is struck so often."""


def spare(training: Training) -> str:
    """SIGKILL of rank 1; a spare takes its place."""
    training.flags += ["--spares", "1"]
    process = training.start_and_wait()
    os.kill(training.seated()[1], signal.SIGKILL)
    _ends_well(training, process)
    return _told(training, 1, from_memory=True)


def fewer(training: Training) -> str:
    """SIGKILL of rank 0; the other goes on alone, until there are two again."""
    training.flags += ["--min-workers", "1"]
    training.rounding = True
    process = training.start_and_wait()
    os.kill(training.seated()[0], signal.SIGKILL)
    _ends_well(training, process)
    if jobs(training.run)[0].ranks != 1:
        raise FaultError(f"{jobs(training.run)[0].ranks} ranks went on, not 1")
    return _told(training, 0, from_memory=True)


def from_checkpoint(training: Training) -> str:
    """SIGKILL of rank 1, whose shard nobody else holds."""
    training.flags += ["--spares", "1", "--strategy.zero", "1"]
    # The norm of shards is added up in another order.
    training.rounding = True
    process = training.start_and_wait()
    os.kill(training.seated()[1], signal.SIGKILL)
    _ends_well(training, process)
    return _told(training, 1, from_memory=False)


def stopped(training: Training) -> str:
    """SIGSTOP of rank 1, which is not heard of again."""
    training.flags += ["--spares", "1", "--timeout", "5"]
    process = training.start_and_wait()
    number = training.seated()[1]
    os.kill(number, signal.SIGSTOP)
    _ends_well(training, process)
    return _told(training, 1, from_memory=True)


def all_at_once(training: Training) -> str:
    """SIGKILL of both ranks and the spare."""
    training.flags += ["--spares", "1"]
    process = training.start_and_wait()
    numbers = training.seated()
    for number in numbers:
        os.kill(number, signal.SIGKILL)
    _ends_well(training, process)
    return f"{len(numbers)} processes, {_told(training, 1, from_memory=False)}"


def successor(training: Training) -> str:
    """SIGKILL of rank 1, and of the spare that is to take its place."""
    training.flags += ["--spares", "1"]
    process = training.start_and_wait()
    # The spare first, so that it is lost when its time comes, or while it takes the place.
    for number in reversed(training.seated()[1:3]):
        os.kill(number, signal.SIGKILL)
    _ends_well(training, process)
    if training.said().count("Signal 9 (SIGKILL) ended it") < 2:
        raise FaultError(f"one of the two was not lost: {training.tail()}")
    return _told(training, 1, from_memory=True)


def again_and_again(training: Training) -> str:
    """SIGKILL of a rank or spare drawn by lot, so often, each after a step more than the last had."""
    training.flags += ["--spares", "1"]
    rng, process = random.Random(0), training.start_and_wait()
    for number in range(1, LOSSES + 1):
        os.kill(rng.choice(training.seated()), signal.SIGKILL)
        step = training.must_be_midway()
        training.wait_for(process, lambda: training.last_step() > step + 20, f"a step after loss {number}")  # noqa: B023
    _ends_well(training, process)
    lost = training.said().count("Signal 9 (SIGKILL) ended it")
    if lost < LOSSES:
        raise FaultError(f"{LOSSES} were killed and {lost} lost")
    return f"{lost} lost, {story(jobs(training.run)[:3])} ..."


def _ends_well(training: Training, process: subprocess.Popen[bytes]) -> None:
    if status := training.wait(process):
        raise FaultError(f"the loss ended the job with status {status}: {training.tail()}")


def _told(training: Training, rank: int, from_memory: bool) -> str:
    """What shows that a rank was lost and others went on, from where they should."""
    training.must_say(f"rank {rank} of 2 is lost. Signal 9 (SIGKILL) ended it")
    (first, *_) = found = jobs(training.run)
    if not 0 < first.after < training.steps:
        raise FaultError(f"they went on after step {first.after} of {training.steps}")
    source = "memory" if from_memory else "the latest checkpoint"
    training.must_say(f"on after step {first.after}, from {source}")
    return f"rank {rank} was lost, {story(found)}, from {source}"


def story(found: list[Job]) -> str:
    """The jobs that a run went on in, in words."""
    return ", ".join(
        f"{job.ranks} rank{'s' * (job.ranks > 1)} went on after step {job.after}"
        + ("" if job.seconds is None else f" {job.seconds:.2f} s later")
        for job in found
    )
