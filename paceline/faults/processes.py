"""Processes that are killed, stopped or asked to end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

from paceline.faults.outcome import curve
from paceline.faults.training import STEPS, FaultError, Training

KILLS = 100


def kill_worker(training: Training) -> None:
    """SIGKILL of one rank."""
    process = training.start()
    training.wait_for_step(process, 10)
    if number := training.ranks().get(1):
        os.kill(number, signal.SIGKILL)
    if training.wait(process) == 0:
        raise FaultError("the job ended with status 0 though a rank was killed")


def kill_all_workers(training: Training) -> None:
    """SIGKILL of both ranks at once."""
    process = training.start()
    training.wait_for_step(process, 10)
    for number in training.ranks().values():
        os.kill(number, signal.SIGKILL)
    training.wait(process)


def kill_launcher(training: Training) -> None:
    """SIGKILL of the process that started the ranks, which must end by themselves."""
    process = training.start()
    training.wait_for_step(process, 10)
    process.kill()
    training.wait(process)


def pause_worker(training: Training) -> None:
    """SIGSTOP of a rank, and SIGCONT two seconds later."""
    process = training.start()
    training.wait_for_step(process, 10)
    number = training.ranks()[1]
    os.kill(number, signal.SIGSTOP)
    time.sleep(2)
    os.kill(number, signal.SIGCONT)
    if status := training.wait(process):
        raise FaultError(f"a short pause ended the job with status {status}")


def terminate(training: Training) -> None:
    """SIGTERM of the launcher: a checkpoint is saved and the status is 143."""
    process = training.start()
    training.wait_for_step(process, 10)
    process.terminate()
    if (status := training.wait(process)) != 143:
        raise FaultError(f"exit status {status}, not 143")
    last = max(curve(training.run))
    if not (training.run / "checkpoints" / f"step-{last:08}" / "manifest.json").exists():
        raise FaultError(f"no checkpoint of step {last}, the last that was done")


def kill_during_resume(training: Training) -> None:
    """SIGKILL of all, then again as soon as the ranks of the next start are there."""
    kill_all_workers(training)
    process = training.start()
    training.wait_for(process, lambda: len(training.ranks()) == 2, "two ranks")
    for number in training.ranks().values():
        os.kill(number, signal.SIGKILL)
    training.wait(process)


def kill_at_random(training: Training, kills: int = KILLS) -> None:
    """SIGKILL of everything at a random moment, so often; a run that gets to its end is followed by another."""
    rng = random.Random(0)
    for _ in range(kills):
        if STEPS in curve(training.run):
            training.next_run()
        before = max(curve(training.run), default=0)
        process = training.start()
        try:
            process.wait(rng.uniform(0.5, 8))
        except subprocess.TimeoutExpired:
            training.end()
        training.wait(process)
        if max(curve(training.run), default=0) < before:
            raise FaultError(f"step {before} was done and is lost from the record")
