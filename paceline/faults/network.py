"""Links between two hosts that go down, lose packets or are slow."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable

from paceline.bench.network.hosts import INTERFACE, Hosts, address
from paceline.faults.outcome import curve
from paceline.faults.training import ATTEMPTS, PATIENCE, STEPS, FaultError, Training

TIMEOUT = 20
"""Seconds after which a rank gives up one that does not answer."""


def _trained(training: Training, gbit: float, disturb: Callable[[Hosts], None]) -> None:
    """Trains one rank on each host; gives both the command again, on hosts made anew, until the run is at its end."""
    for attempt in range(ATTEMPTS):
        with Hosts(2, gbit) as hosts, training.log.open("ab") as log:
            jobs = []
            for rank in range(2):
                place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29500}
                variables = {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": address(0)}
                command = [*training.arguments(workers=None), "--timeout", str(TIMEOUT)]
                jobs.append(hosts.start(rank, command, variables, stdout=log, stderr=log))
            if attempt == 0:
                training.wait_for_step(jobs[0], 6)
                disturb(hosts)
            deadline = time.monotonic() + PATIENCE
            for job in jobs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(max(0.0, deadline - time.monotonic()))
            if any(job.poll() is None for job in jobs):
                raise FaultError(f"a rank does not end: {training.said()[-600:]}")
        if STEPS in curve(training.run):
            return
    raise FaultError(f"after {ATTEMPTS} starts: {training.said()[-600:]}")


def _on(hosts: Hosts, host: int, *command: str) -> None:
    job = hosts.start(host, command, stderr=subprocess.PIPE)
    _, said = job.communicate()
    if job.returncode:
        raise FaultError(f"{' '.join(command)}: {said.decode(errors='replace').strip()}")


def link_down(training: Training) -> None:
    """The link goes down and stays so."""
    _trained(training, 1, lambda hosts: _on(hosts, 1, "ip", "link", "set", INTERFACE, "down"))


def loss(training: Training) -> None:
    """Five of a hundred packets are lost on their way in."""
    rule = "table ip lossy { chain in { type filter hook input priority 0; numgen random mod 100 < 5 drop; }; }"
    _trained(training, 1, lambda hosts: _on(hosts, 1, "nft", rule))


def partition(training: Training) -> None:
    """Nothing passes for three seconds."""

    def disturb(hosts: Hosts) -> None:
        _on(hosts, 1, "nft", "table ip cut { chain in { type filter hook input priority 0; drop; }; }")
        time.sleep(3)
        _on(hosts, 1, "nft", "delete table ip cut")

    _trained(training, 1, disturb)


def slow_link(training: Training) -> None:
    """The link carries 10 Mbit/s."""
    _trained(training, 0.01, lambda hosts: None)
