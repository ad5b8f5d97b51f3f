"""Every fault: what is done, what is expected, and what the machine must have for it."""

from __future__ import annotations

from paceline.bench.network import hosts
from paceline.faults import damage, disk, failover, lost_hosts, network, processes, resources, saving
from paceline.faults.fault import Fault
from paceline.faults.machine import needs_root

GOES_ON = "the job ends, and the same command goes on from the latest checkpoint"
ENDURED = "training goes on"
BEFORE = "the file is named, and the checkpoint before is taken"
FROM_MEMORY = "the others go on from memory"
FROM_CHECKPOINT = "the others go on from the latest checkpoint"
WARNED = "training goes on with a warning, and older checkpoints are as they were"
BOTH = "the same commands go on from the latest checkpoint"
TIMED_OUT = f"both ranks end after the time limit; {BOTH}"

FAULTS = (
    Fault("kill-worker", "SIGKILL of a rank", f"{GOES_ON}; the rank is named", processes.kill_worker),
    Fault("kill-all", "SIGKILL of all ranks at once", GOES_ON, processes.kill_all),
    Fault("kill-launcher", "SIGKILL of the launcher", f"its ranks end, too; {GOES_ON}", processes.kill_launcher),
    Fault("kill-resuming", "SIGKILL of all, and again while they go on", GOES_ON, processes.kill_while_resuming),
    Fault("pause", "SIGSTOP of a rank, SIGCONT after 2 s", ENDURED, processes.pause),
    Fault("terminate", "SIGTERM", "a checkpoint of the last step; exit status 143", processes.terminate),
    Fault("lose-worker", "SIGKILL of a rank, with a spare", FROM_MEMORY, failover.spare),
    Fault("lose-shard", "the same at stage 1", FROM_CHECKPOINT, failover.from_checkpoint),
    Fault("lose-all", "SIGKILL of all ranks and the spare", FROM_CHECKPOINT, failover.all_at_once),
    Fault("lose-successor", "SIGKILL of a rank and of its successor", FROM_MEMORY, failover.successor),
    Fault("lose-stopped", "SIGSTOP of a rank for good, with a spare", FROM_MEMORY, failover.stopped),
    Fault("shrink", "SIGKILL of a rank, without a spare", "one goes on, and two again", failover.fewer),
    Fault("flip", "a bit of the latest checkpoint flipped", BEFORE, damage.flip),
    Fault("zero", "8000 bytes of it zeroed", BEFORE, damage.zero),
    Fault("truncate", "a file of it truncated", BEFORE, damage.truncate),
    Fault("remove", "a file of it removed", BEFORE, damage.remove),
    Fault("half-manifest", "its manifest cut off", BEFORE, damage.half_manifest),
    Fault(
        "kill-random",
        f"SIGKILL of all at {processes.KILLS} random moments",
        f"each time: {GOES_ON}",
        processes.kill_at_random,
        long=True,
    ),
    Fault(
        "kill-loop",
        f"SIGKILL of {failover.LOSSES} workers, one after the other",
        f"each time: {FROM_MEMORY}",
        failover.again_and_again,
        long=True,
        steps=failover.MORE_STEPS,
    ),
    Fault(
        "kill-saving",
        "SIGKILL of a save at each of its system calls that change the disk",
        "that checkpoint or the one before loads",
        saving.kill_at_every_call,
        trains=False,
        long=True,
        missing=needs_root("strace"),
    ),
    Fault(
        "disk-full",
        f"a tmpfs of {disk.SIZE} MiB full until the training has ended",
        f"{WARNED}; with room, the same command goes on",
        disk.full,
        long=True,
        missing=needs_root("mount"),
    ),
    Fault(
        "read-only",
        "an ext4 read-only after an error, then repaired",
        f"{WARNED}; the same command goes on",
        disk.read_only,
        long=True,
        missing=needs_root("mount", "mkfs.ext4", "e2fsck", packages="e2fsprogs"),
    ),
    Fault(
        "power-loss",
        "all killed, and what an ext4 was not told to sync lost",
        "that checkpoint or the one before loads; the same command goes on",
        disk.power_loss,
        long=True,
        missing=needs_root("mount", "mkfs.ext4", "e2fsck", packages="e2fsprogs"),
    ),
    Fault(
        "out-of-memory",
        "a rank killed by the kernel in a cgroup without memory",
        f"the message speaks of memory; {GOES_ON}",
        resources.out_of_memory,
        long=True,
        missing=lambda: resources.missing(resources.MEMORY),
    ),
    Fault(
        "slow-rank",
        f"{resources.QUOTA} % of a core for a rank, by a cgroup",
        ENDURED,
        resources.slow,
        long=True,
        missing=lambda: resources.missing(resources.PROCESSOR),
    ),
    Fault(
        "lose-first-host",
        "all processes of the host that ranks meet at killed",
        f"the other's rank ends; {BOTH}",
        network.first_host_lost,
        long=True,
        missing=hosts.missing,
    ),
    Fault(
        "lose-other-host",
        "all processes of the other host killed",
        f"the other's rank ends; {BOTH}",
        network.second_host_lost,
        long=True,
        missing=hosts.missing,
    ),
    Fault(
        "lose-host",
        "all processes of a host killed, with --min-workers on both",
        "the other goes on from memory",
        lost_hosts.lost,
        long=True,
        missing=hosts.missing,
    ),
    Fault(
        "cut-off-host",
        "the link of two hosts down, with --min-workers on both",
        "one goes on from memory, the other ends its ranks, and joins again",
        lost_hosts.cut_off,
        steps=failover.MORE_STEPS,
        long=True,
        missing=hosts.missing,
    ),
    Fault("link-down", "the link of two hosts down", TIMED_OUT, network.link_down, long=True, missing=hosts.missing),
    Fault("link-flap", "the same for 3 s", ENDURED, network.link_flap, long=True, missing=hosts.missing),
    Fault("partition", "packets pass one way only", TIMED_OUT, network.partition, long=True, missing=network.needs_nft),
    Fault(
        "packet-loss", f"{network.LOST} % of packets lost", ENDURED, network.loss, long=True, missing=network.needs_nft
    ),
    Fault(
        "slow-link",
        f"{1000 * network.SLOW_GBIT:.0f} Mbit/s for {1000 * network.GBIT:.0f}",
        ENDURED,
        network.slow_link,
        long=True,
        missing=hosts.missing,
    ),
)
