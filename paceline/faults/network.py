"""Two hosts that lose each other, or whose link is bad: one rank on each, in network namespaces."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import time

from paceline.bench.network.hosts import FOLDER, INTERFACE, Hosts, NetworkUnavailable, address, limit, missing
from paceline.faults.machine import needs_root
from paceline.faults.outcome import lines
from paceline.faults.training import ATTEMPTS, PATIENCE, FaultError, LackingError, Training

GBIT = 1.0
SLOW_GBIT = 0.01
TIMEOUT = 20
"""Seconds after which a rank gives up one that does not answer."""
CUT_SECONDS = 3.0
LOST = 5
"""Per cent of packets."""

SHOWN = ("perf/step_seconds", "comm/exposed_fraction")
"""Figures by which a slow link is told."""
RULES = "table ip paceline { chain in { type filter hook input priority 0; %s counter drop; }; }"


class Pair:
    """Two hosts and the ranks on them, until the training is closed."""

    def __init__(self, training: Training, workers: int | None = None) -> None:
        """Makes the hosts.

        Args:
            training: Of which each has a rank.
            workers: That the command starts on each; None: it is the rank itself.
        """
        self.training, self._workers = training, workers
        training.rounding = True
        training.flags += ["--timeout", str(TIMEOUT)]
        try:
            self.hosts = Hosts(2, GBIT)
        except NetworkUnavailable as error:
            raise LackingError(str(error).removeprefix("needs ")) from None
        training.closing.callback(self.hosts.close)
        self.ranks: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Starts a rank on each."""
        self.ranks = []
        for rank in range(2):
            place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29500}
            names = {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": INTERFACE, "TMPDIR": FOLDER}
            names["PACELINE_HOST"] = str(rank)
            variables = {key: str(value) for key, value in place.items()} | names
            with self.training.log() as log:
                environment = self.training.environment() | variables
                command = self.training.command(self._workers)
                # Memory of its own.
                command = ["sh", "-c", f'mount -t tmpfs host {FOLDER} && exec "$@"', "sh", *command]
                self.ranks.append(self.hosts.start(rank, command, environment, stdout=log, stderr=log))

    def start_and_wait(self) -> int:
        """Starts them; the step that was done last, in the midst of the training."""
        self.start()
        self.training.wait_for_checkpoints(self.ranks[0], 1)
        return self.training.must_be_midway()

    def wait(self) -> list[int]:
        """Exit status of each rank.

        Raises:
            FaultError: One does not end.
        """
        deadline = time.monotonic() + PATIENCE
        try:
            return [rank.wait(max(0.1, deadline - time.monotonic())) for rank in self.ranks]
        except subprocess.TimeoutExpired:
            raise FaultError(f"a rank does not end within {PATIENCE:.0f} s: {self.training.tail()}") from None

    def must_end_well(self) -> None:
        """Waits for the ranks.

        Raises:
            FaultError: One fails.
        """
        if any(statuses := self.wait()):
            raise FaultError(f"the job ended with statuses {statuses}: {self.training.tail()}")

    def go_on(self) -> None:
        """Gives both hosts the same command, until the run is at its end.

        Raises:
            FaultError: It does not get there.
        """
        for _ in range(ATTEMPTS):
            if self.training.last_step() == self.training.steps:
                return
            self.start()
            self.wait()
        raise FaultError(f"after {ATTEMPTS} more starts: {self.training.tail()}")

    def on(self, host: int, *command: str) -> str:
        """What a program says that ends at once.

        Raises:
            FaultError: It fails.
        """
        job = self.hosts.start(host, command, stderr=subprocess.PIPE)
        said, complaint = job.communicate()
        if job.returncode:
            raise FaultError(f"{' '.join(command)}: {complaint.decode(errors='replace').strip()}")
        return said.decode(errors="replace")

    def drop(self, which: str) -> None:
        """Drops and counts packets that come to host 1.

        Args:
            which: What nft says of them.

        Raises:
            LackingError: The kernel cannot.
        """
        try:
            self.on(1, "nft", RULES % which)
        except FaultError as error:
            raise LackingError(f"a kernel with nf_tables: {error}") from None

    def dropped(self) -> int:
        """Packets that the rules on host 1 have dropped so far."""
        found = json.loads(self.on(1, "nft", "--json", "list", "ruleset"))["nftables"]
        rules = [each["rule"]["expr"] for each in found if "rule" in each]
        return sum(part["counter"]["packets"] for rule in rules for part in rule if "counter" in part)

    def held_back(self) -> int:
        """How often what host 1 sends has had to wait so far, for the rate of its link."""
        found = json.loads(self.on(1, "tc", "-s", "-j", "qdisc", "show", "dev", INTERFACE))
        return sum(each["overlimits"] for each in found)

    def link_is_down(self) -> bool:
        """As host 1 sees it."""
        return "state DOWN" in self.on(1, "ip", "-o", "link", "show", INTERFACE)


def first_host_lost(training: Training) -> str:
    """Every process of the host that the ranks meet at is killed."""
    return _host_lost(training, 0)


def second_host_lost(training: Training) -> str:
    """Every process of the other host is killed."""
    return _host_lost(training, 1)


def _host_lost(training: Training, host: int) -> str:
    pair = Pair(training)
    step = pair.start_and_wait()
    lost = [number for number, items in training.processes().items() if items.get("PACELINE_HOST") == str(host)]
    for number in lost:
        os.kill(number, signal.SIGKILL)
    began = time.monotonic()
    other = pair.wait()[1 - host]
    seconds = time.monotonic() - began
    if not other:
        raise FaultError("the other host's rank ended as if nothing had happened")
    pair.go_on()
    what = f"{len(lost)} processes of host {host} were killed after step {step}"
    return f"{what}; the other rank ended {seconds:.1f} s later"


def link_down(training: Training) -> str:
    """The link goes down, and comes up only when the job has ended."""
    pair = Pair(training)
    step = pair.start_and_wait()
    pair.on(1, "ip", "link", "set", INTERFACE, "down")
    if not pair.link_is_down():
        raise FaultError("the link is not down")
    began = time.monotonic()
    statuses = pair.wait()
    seconds = time.monotonic() - began
    if 0 in statuses:
        raise FaultError(f"the ranks ended with {statuses}, though they could not reach each other")
    pair.on(1, "ip", "link", "set", INTERFACE, "up")
    pair.go_on()
    return f"the link was down after step {step}; both ranks had ended {seconds:.1f} s later (time limit {TIMEOUT} s)"


def link_flap(training: Training) -> str:
    """The link is down for three seconds."""
    pair = Pair(training)
    pair.start_and_wait()
    pair.on(1, "ip", "link", "set", INTERFACE, "down")
    if not pair.link_is_down():
        raise FaultError("the link is not down")
    time.sleep(0.5)
    step = training.must_be_midway()
    time.sleep(CUT_SECONDS - 0.5)
    if training.last_step() > step:
        raise FaultError(f"the link is down, and the ranks went on from step {step} to {training.last_step()}")
    pair.on(1, "ip", "link", "set", INTERFACE, "up")
    pair.must_end_well()
    return f"the link was down for {CUT_SECONDS:.0f} s after step {step}, and no step was done meanwhile"


def partition(training: Training) -> str:
    """Host 1 hears nothing from host 0, which hears it."""
    pair = Pair(training)
    step = pair.start_and_wait()
    pair.drop(f'iifname "{INTERFACE}"')
    began = time.monotonic()
    statuses = pair.wait()
    seconds, dropped = time.monotonic() - began, pair.dropped()
    if not dropped:
        raise FaultError("no packet was dropped")
    if 0 in statuses:
        raise FaultError(f"the ranks ended with {statuses}, though one could not hear the other")
    pair.on(1, "nft", "delete table ip paceline")
    pair.go_on()
    return f"{dropped} packets were dropped after step {step}; both ranks had ended {seconds:.1f} s later"


def loss(training: Training) -> str:
    """Some packets are lost on their way."""
    pair = Pair(training)
    step = pair.start_and_wait()
    pair.drop(f"numgen random mod 100 < {LOST}")
    pair.must_end_well()
    if not (dropped := pair.dropped()):
        raise FaultError("no packet was dropped")
    return f"{dropped} packets were dropped after step {step}"


def slow_link(training: Training) -> str:
    """The link carries a hundredth of what it did."""
    pair = Pair(training)
    step = pair.start_and_wait()
    pair.on(1, "tc", "qdisc", "change", "dev", INTERFACE, "root", *limit(SLOW_GBIT).split())
    held_back = pair.held_back()
    pair.must_end_well()
    held_back = pair.held_back() - held_back
    figures = {line["step"]: line for line in lines(training.run) if "train/loss" in line}
    before, after = (
        [statistics.median(line[name] for at, line in figures.items() if chosen(at)) for name in SHOWN]
        for chosen in (lambda at: 1 < at < step, lambda at: at > step + 1)
    )
    # A step's time tells nothing where other programs take most of it.
    if held_back < (left := training.steps - step):
        raise FaultError(f"packets had to wait {held_back} times in {left} steps: the link is not slow")
    return (
        f"packets had to wait {held_back} times; a step took {after[0]:.3f} s instead of {before[0]:.3f}, of which "
        f"{after[1]:.0%} instead of {before[1]:.0%} were exposed communication"
    )


def needs_nft() -> str:
    """What it lacks to drop packets, too."""
    return missing() or needs_root("nft", packages="nftables")()
