"""How many cores there are for this process, and whether it gets them."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from paceline.core.errors import UserError
from paceline.launch.screen import show

CGROUPS = Path("/sys/fs/cgroup")
MOST_THREADS = 4096
"""More threads than hosts have cores. With some tens of thousands OpenMP's runtime ends the process without a word."""


def available_cores() -> int:
    """Cores that this process may use: those that it is bound to, or fewer if its control group has a quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(bound, _quota())))


def threads_per_rank(threads: int, local_ranks: int) -> int:
    """`threads`; with 0 what OMP_NUM_THREADS says, else the cores shared out among the ranks of this host.

    At least one each.

    Raises:
        UserError: OMP_NUM_THREADS asks for more threads than any host could run.
    """
    if threads:
        return threads
    # A list is for nested parallelism, its first entry for the outermost.
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if given.isdecimal() and (wanted := int(given[:20])) > 0:
        if wanted > MOST_THREADS:
            raise UserError(f"OMP_NUM_THREADS: expected at most {MOST_THREADS}, got {wanted}; set fewer, or unset it")
        return wanted
    return max(1, available_cores() // local_ranks)


def threads_each(workers: int, threads: int) -> int:
    """Threads of each worker; warns of more than there are cores for.

    Args:
        workers: Ranks that compute at once.
        threads: Of each; 0: as OMP_NUM_THREADS says, else the cores shared out.
    """
    cores, threads = available_cores(), threads_per_rank(threads, workers)
    if workers * threads > cores:
        show(
            f"warning: {workers} workers of {threads} threads share {cores} cores, which is slower than "
            f"--workers {max(1, cores // threads)}" + (" or --threads 1" if threads > 1 else ""),
            warning=True,
        )
    return threads


CROWDED = 0.25
"""From this share of the time in which other work has the cores, whoever measures times says so."""


def waited_for_a_core() -> float:
    """Seconds in which this process's main thread could have run, but all cores did other work; 0 if nobody knows."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _quota() -> float:
    """Cores that control groups grant; infinite without a limit."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        return min((_granted(*line.split(":", 2)[1:]) for line in lines if line.count(":") >= 2), default=math.inf)
    return math.inf


def _granted(controllers: str, path: str) -> float:
    """What the group at `path` and those above it grant, of version 2, or of version 1 with the cpu controller."""
    if controllers and "cpu" not in controllers.split(","):
        return math.inf
    root = CGROUPS / controllers if controllers and (CGROUPS / controllers).is_dir() else CGROUPS
    root = CGROUPS / "cpu" if controllers and root == CGROUPS else root
    group = root / path.lstrip("/")
    least = math.inf
    # In a container the path may be the host's, where nothing is mounted: the root then is the container's own.
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if controllers:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            else:
                quota, period = (folder / "cpu.max").read_text().split()
            if quota.strip() != "max" and int(quota) > 0:
                least = min(least, int(quota) / int(period))
        if folder == root:
            break
    return least
