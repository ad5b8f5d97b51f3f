"""This machine as hardware for plans: measured once for each number of ranks, then kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

import paceline as pl
from paceline.calibrate.kept import folder, keep, taken
from paceline.calibrate.probe import fitted
from paceline.calibrate.rank import Measured, measure, measure_in
from paceline.comm.world import World
from paceline.core.errors import UserError
from paceline.launch.cores import CROWDED, available_cores, threads_per_rank
from paceline.launch.pool import RankPool, RanksFailed
from paceline.materialise.freed import forget_memory
from paceline.measuring.results import machine
from paceline.plan import profile_file
from paceline.plan.hardware import Device, Hardware, Kernels, Link, Rates
from paceline.plan.slow_work import told_to, told_while_slow

WAY = 2
"""Counts up when machines are measured in another way: what was measured in the one before is not used."""
SECONDS = 12.0
"""About how long measuring takes on a quiet machine."""
LIMIT = 300.0
"""Seconds after which measuring is given up: by then times are of other work."""


def here(ranks: int, *, anew: bool = False, report: Callable[[str], object] = lambda _: None) -> Hardware:
    """This machine's CPU, as so many ranks that compute at once each have it.

    Args:
        ranks: Processes that share the machine's cores, each with as many threads as `paceline train` gives it.
        anew: Whether to measure even where a measurement is kept.
        report: Is told what is being done, and why a kept measurement is not used.

    Raises:
        UserError: Measuring failed.
    """
    path = cached(ranks, threads_per_rank(0, ranks))
    if not anew and (before := taken(path, report)) is not None:
        return before
    report(f"measuring this machine with {ranks} rank{'s' if ranks > 1 else ''}, about {SECONDS:.0f} s on a quiet one")
    found, crowded = measured_here(ranks, SECONDS)
    _keep(path, found, crowded, report)
    return found


def kept(ranks: int, threads: int) -> Hardware | None:
    """What was measured of this machine, as so many ranks of so many threads have it, if it was."""
    return taken(cached(ranks, threads))


def measured_in_job(world: World, report: Callable[[str], object] = lambda _: None) -> Hardware:
    """This job's machines as its ranks have them, by measuring in it; kept where all are on this host.

    A collective call of a job between CPUs. All ranks get the same.
    """
    with told_to(report), _told_while_slow(SECONDS):
        everyone: list[dict[str, Any]] = pl.all_gather_json(
            msgspec.to_builtins(measure_in(world, SECONDS)), "what this machine takes"
        )
    results = [msgspec.convert(each, Measured, strict=False) for each in everyone]
    # The job goes on with something else, and tells what that held at most.
    forget_memory()
    ranks = world.world_size
    threads = torch.get_num_threads()
    found = fitted(_hardware(results, ranks, threads), results[0].smallest, results[0].steps, ranks)
    if world.rank == 0 and world.local_world_size == ranks:
        _keep(cached(ranks, threads), found, max(each.crowded for each in results), report)
    return found


def _keep(path: Path, found: Hardware, crowded: float, report: Callable[[str], object]) -> None:
    if crowded > CROWDED:
        report(
            f"for {100 * crowded:.0f} % of the time in which this machine was measured other work had its cores, so "
            "that all times are too long: this is not kept, and the next plan measures again"
        )
        return
    keep(path, found, report)


def measurable(devices: int) -> int:
    """How many ranks are measured for a plan of so many: as many, but not more than two for each core."""
    return min(devices, 2 * available_cores())


def cached(ranks: int, threads: int) -> Path:
    """Where a measurement is kept: its name stands for the machine, torch, and how many ranks have how many threads."""
    return folder() / f"{_identity(ranks, threads)}.json"


def measured_here(ranks: int, seconds: float = SECONDS) -> tuple[Hardware, float]:
    """Measures this machine for about so long.

    Returns:
        What was found, and the share of the time in which other work had the cores.

    Raises:
        UserError: A rank failed.
    """
    threads = threads_per_rank(0, ranks)
    try:
        with _told_while_slow(seconds), RankPool(ranks, threads, fresh=True) as pool:
            results: list[Measured] = pool.run(measure, seconds, limit=LIMIT)
    except RanksFailed as failed:
        raise UserError(
            f"measuring this machine failed: {failed.summary}; if other work has its cores, try again when that has "
            "ended; a plan does without, with --hardware and a profile's name or file"
        ) from None
    hardware = fitted(_hardware(results, ranks, threads), results[0].smallest, results[0].steps, ranks)
    return hardware, max(each.crowded for each in results)


def _told_while_slow(seconds: float) -> AbstractContextManager[None]:
    """Says how far measuring is where it takes longer than on a quiet machine."""
    began = time.perf_counter()
    return told_while_slow(
        lambda: (
            f"still measuring after {time.perf_counter() - began:.0f} s: other work may have the cores, or "
            "bfloat16 be slow here"
        ),
        2 * seconds,
    )


def _hardware(results: Sequence[Measured], ranks: int, threads: int) -> Hardware:
    facts = machine()
    ceiling = {dtype: median(each.ceiling[dtype] for each in results) for dtype in results[0].ceiling}
    reduced = results[0].rates.get(f"all_reduce {ranks}", Rates(1e-5, per_byte=1e-10))
    # Both halves of a ring move (n - 1) / n of a buffer, and take n - 1 rounds each.
    share = 2 * (ranks - 1) / ranks if ranks > 1 else 1.0
    within = Link(reduced.fixed / max(1, 2 * (ranks - 1)), share / max(reduced.per_byte, 1e-13))
    launch = median(each.launch for each in results)
    return Hardware(
        Device(
            name=f"{facts['cpu'] or platform.machine()}, {threads} thread{'s' if threads > 1 else ''}",
            memory=int(facts["memory_bytes"]) // ranks,
            bandwidth=median(each.bandwidth for each in results),
            peak=ceiling,
            ceiling=ceiling,
        ),
        Kernels(launch, 1.0, 1.0, 0.0, 0.5),
        devices_per_host=ranks,
        within=within,
        between=within,
        framework=int(median(each.framework for each in results)),
        source=f"measured on this machine with {ranks} rank{'s' if ranks > 1 else ''}",
        measured=_middle([each.rates for each in results]),
    )


def _middle(found: Sequence[Mapping[str, Rates]]) -> dict[str, Rates]:
    """The medians of all ranks' rates."""
    parts = ("fixed", "per_flop", "per_byte", "per_block")
    return {
        name: Rates(**{part: median(getattr(each[name], part) for each in found) for part in parts})
        for name in found[0]
    }


def _identity(ranks: int, threads: int) -> str:
    facts = machine()
    known = {name: facts[name] for name in ("cpu", "cores", "memory_bytes")}
    described = json.dumps(
        [known, platform.node(), torch.__version__, ranks, threads, profile_file.VERSION, WAY],
        sort_keys=True,
    )
    return f"{ranks}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"
