"""Processes that are killed, stopped or asked to end; the job ends with them, and the same command goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

from paceline.faults.outcome import curve, wrong_with_checkpoints
from paceline.faults.training import FaultError, Training

KILLS = 100
PAUSE_SECONDS = 2.0


def kill_worker(training: Training) -> str:
    """SIGKILL of rank 1."""
    process = training.start_and_wait()
    os.kill(training.ranks()[1], signal.SIGKILL)
    status = training.wait(process)
    step = training.must_be_midway()
    if status != 128 + signal.SIGKILL:
        raise FaultError(f"the job ended with status {status}, and not the killed rank's: {training.tail()}")
    training.must_say("rank 1")
    training.must_say("Signal 9 (SIGKILL) ended it")
    return f"signal 9 ended rank 1 after step {step}"


def kill_all(training: Training, checkpoints: int = 1) -> str:
    """SIGKILL of all ranks at once."""
    process = training.start_and_wait(checkpoints)
    numbers = training.ranks().values()
    for number in numbers:
        os.kill(number, signal.SIGKILL)
    training.wait(process)
    training.must_say("Signal 9 (SIGKILL) ended it")
    return f"signal 9 was sent to {len(numbers)} ranks after step {training.must_be_midway()}"


def kill_launcher(training: Training) -> str:
    """SIGKILL of the process that started the ranks, which must end by themselves."""
    process = training.start_and_wait()
    left = len(training.ranks())
    process.kill()
    began = time.monotonic()
    training.wait(process)
    seconds = time.monotonic() - began
    return (
        f"signal 9 ended the launcher after step {training.must_be_midway()}, {left} ranks ended {seconds:.2f} s later"
    )


def pause(training: Training) -> str:
    """SIGSTOP of a rank, and SIGCONT two seconds later."""
    process = training.start_and_wait()
    number = training.ranks()[1]
    os.kill(number, signal.SIGSTOP)
    time.sleep(0.5)
    step = training.must_be_midway()
    time.sleep(PAUSE_SECONDS - 0.5)
    if training.last_step() > step:
        raise FaultError(f"a rank is stopped, and the others went on from step {step} to {training.last_step()}")
    os.kill(number, signal.SIGCONT)
    if status := training.wait(process):
        raise FaultError(f"a short pause ended the job with status {status}: {training.tail()}")
    return f"no step was done for {PAUSE_SECONDS - 0.5:.1f} s after step {step}"


def terminate(training: Training) -> str:
    """SIGTERM of the launcher: a checkpoint of the last step is saved, and the status is 143."""
    process = training.start_and_wait()
    process.terminate()
    if (status := training.wait(process)) != 128 + signal.SIGTERM:
        raise FaultError(f"exit status {status}, not 143: {training.tail()}")
    step = training.must_be_midway()
    if (saved := training.checkpoints()[0].name) != f"step-{step:08}":
        raise FaultError(f"step {step} was the last that was done, and the latest checkpoint is {saved}")
    return f"exit status 143 after step {step}, of which there is a checkpoint"


def kill_while_resuming(training: Training) -> str:
    """SIGKILL of all, then again as soon as the ranks of the next start are there."""
    first = kill_all(training)
    process = training.start()
    training.wait_for(process, lambda: len(training.ranks()) == 2, "two ranks")
    time.sleep(2)
    numbers = list(training.ranks().values())
    if len(numbers) < 2:
        raise FaultError(f"the ranks that go on ended before they were killed: {training.tail()}")
    for number in numbers:
        os.kill(number, signal.SIGKILL)
    training.wait(process)
    return f"{first}; and again while they went on, at step {training.must_be_midway()}"


def kill_at_random(training: Training) -> str:
    """SIGKILL of everything at random moments; a run that gets to its end is followed by another, which is alike."""
    rng, struck, amid, runs = random.Random(0), 0, 0, list[dict[int, tuple[float, ...]]]()
    while struck < KILLS:
        if training.last_step() == training.steps:
            runs.append(curve(training.run))
            training.begin_again()
        before = training.last_step()
        process = training.start()
        if struck % 2:
            training.wait_for(process, lambda: training.last_step() > before, f"a step after {before}")  # noqa: B023
        try:
            # Every other time while it starts, goes on or ends, as it comes.
            process.wait(rng.uniform(0, 2) if struck % 2 else rng.uniform(0, 8))
        except subprocess.TimeoutExpired:
            training.kill()
            struck += 1
            amid += before < training.last_step() < training.steps
        training.wait(process)
        if training.last_step() < before:
            raise FaultError(f"step {before} was done and is lost from the record")
        if training.checkpoints() and (wrong := wrong_with_checkpoints(training.run)):
            raise FaultError(f"after kill {struck}: {'; '.join(wrong)}")
    training.go_on()
    if any(run != curve(training.run) for run in runs):
        raise FaultError("runs that were killed at other moments have other losses")
    if amid < KILLS // 4:
        raise FaultError(f"of {KILLS} kills only {amid} struck while steps were done")
    return f"{struck} kills of all processes, {amid} of them while steps were done, in {len(runs) + 1} runs"
