"""Every fault: what is done, what is expected, and what the machine must have for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from paceline.bench.network import hosts
from paceline.faults import damage, disk, memory, network, processes
from paceline.faults.training import Training

GOES_ON = "the job ends; the same command goes on"
ENDURED = "training goes on"
BEFORE = "named; the checkpoint before is taken"


@dataclass(frozen=True)
class Fault:
    """One row. `act` brings it about; the run is then brought to its end and compared with an undisturbed one."""

    name: str
    done: str
    expected: str
    act: Callable[[Training], None]
    long: bool = False
    missing: Callable[[], str] = lambda: ""
    """What the machine lacks, in words; empty for nothing."""


def _root(*programs: str) -> Callable[[], str]:
    def missing() -> str:
        lacking = [] if os.geteuid() == 0 else ["root"]
        return ", ".join(lacking + [f"the program {name}" for name in programs if shutil.which(name) is None])

    return missing


def _network(*programs: str) -> Callable[[], str]:
    return lambda: hosts.missing() or _root(*programs)()


def _memory() -> str:
    return _root()() or ("" if memory.CONTROLLER.is_dir() else "the memory controller of cgroup v1")


FAULTS = (
    Fault("kill-worker", "SIGKILL of a rank", GOES_ON, processes.kill_worker),
    Fault("kill-all", "SIGKILL of all ranks at once", GOES_ON, processes.kill_all_workers),
    Fault(
        "kill-launcher",
        "SIGKILL of the launcher",
        "its ranks end too; the same command goes on",
        processes.kill_launcher,
    ),
    Fault("pause", "SIGSTOP of a rank, SIGCONT after 2 s", ENDURED, processes.pause_worker),
    Fault("terminate", "SIGTERM", "saved, exit status 143; the same command goes on", processes.terminate),
    Fault("kill-resume", "SIGKILL while going on after a SIGKILL", GOES_ON, processes.kill_during_resume, True),
    Fault("kill-random", "SIGKILL at 100 random moments", GOES_ON, processes.kill_at_random, True),
    Fault("flip", "a bit of the latest checkpoint flipped", BEFORE, damage.flip),
    Fault("zero", "800 bytes of it zeroed", BEFORE, damage.zero, True),
    Fault("truncate", "a file of it truncated", BEFORE, damage.truncate, True),
    Fault("remove", "a file of it removed", BEFORE, damage.remove, True),
    Fault("half-manifest", "half of its manifest", BEFORE, damage.half_manifest, True),
    Fault(
        "disk-full",
        "a full tmpfs, then room",
        "no file is lost; the run gets to its end",
        disk.full,
        True,
        _root("mount"),
    ),
    Fault("read-only", "ext4 remounted read-only", GOES_ON, disk.read_only, True, _root("mount", "mkfs.ext4")),
    Fault(
        "out-of-memory",
        "a rank in a cgroup of 48 MiB",
        "the message speaks of memory",
        memory.out_of_memory,
        True,
        _memory,
    ),
    Fault("link-down", "the link of two hosts down", GOES_ON, network.link_down, True, _network()),
    Fault("partition", "no packet passes for 3 s", ENDURED, network.partition, True, _network("nft")),
    Fault("packet-loss", "5 % of packets lost", ENDURED, network.loss, True, _network("nft")),
    Fault("slow-link", "10 Mbit/s between two hosts", ENDURED, network.slow_link, True, _network()),
)
