"""One of two hosts that is lost while the other goes on: a launcher on each, in network namespaces."""

from __future__ import annotations

import os
import signal

from paceline.bench.network.hosts import INTERFACE
from paceline.faults.failover import story
from paceline.faults.network import Pair
from paceline.faults.outcome import jobs
from paceline.faults.training import FaultError, Training


def lost(training: Training) -> str:
    """Every process of the second host is killed; the other goes on alone."""
    pair = _launched(training)
    step = pair.start_and_wait()
    gone = [number for number, items in training.processes().items() if items.get("PACELINE_HOST") == "1"]
    for number in gone:
        os.kill(number, signal.SIGKILL)
    if pair.wait()[0]:
        raise FaultError(f"the loss ended the job: {training.tail()}")
    return f"{len(gone)} processes of host 1 were killed after step {step}; {_told(training, 1)}"


def cut_off(training: Training) -> str:
    """The link goes down until the other host has gone on alone, then up: there are two again."""
    pair = _launched(training)
    step = pair.start_and_wait()
    pair.on(1, "ip", "link", "set", INTERFACE, "down")
    if not pair.link_is_down():
        raise FaultError("the link is not down")
    training.wait_for(pair.ranks[0], lambda: bool(jobs(training.run)), "job of one rank")
    pair.on(1, "ip", "link", "set", INTERFACE, "up")
    if any(pair.wait()):
        raise FaultError(f"the loss ended the job: {training.tail()}")
    return f"the link was down after step {step}; {_told(training, 1)}"


def _launched(training: Training) -> Pair:
    training.flags += ["--min-workers", "1"]
    return Pair(training, workers=1)


def _told(training: Training, ranks: int) -> str:
    training.must_say("rank 1 of 2 is lost. Its host 1 of 2 is gone or cut off.")
    found = jobs(training.run)
    if found[0].ranks != ranks:
        raise FaultError(f"{found[0].ranks} ranks went on, not {ranks}")
    training.must_say(f"on after step {found[0].after}, from memory")
    return f"{story(found)}, from memory"
