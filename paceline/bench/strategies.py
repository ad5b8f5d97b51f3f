"""`paceline bench strategies`: every stage of ZeRO and every way to synchronise, against its peers."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

import paceline as pl
from paceline.bench.peers import peers
from paceline.bench.ranks import run_ranks
from paceline.bench.subject_line import progress
from paceline.command_line.json_file import JsonFile
from paceline.core.errors import UserError
from paceline.core.strategy import SYSTEMS, Strategy
from paceline.launch.pool import RanksFailed
from paceline.measuring.cases import CASES, GROUPS, Case, Precision, System, Training
from paceline.measuring.loops import one_process, parallel
from paceline.measuring.meters import held_bytes, sent_bytes, sent_since, watching_memory
from paceline.measuring.results import Row, make_row, print_rows, write_json
from paceline.models.presets import preset

OURS: dict[str, Strategy] = {
    "zero 0": Strategy(),
    "zero 1": Strategy(zero=1),
    "zero 2": Strategy(zero=2),
    "zero 1, shared parameters": Strategy(zero=1, share_parameters=True),
    "zero 2, shared parameters": Strategy(zero=2, share_parameters=True),
    "zero 3": Strategy(zero=3),
    "zero 3, parameters kept": Strategy(zero=3, accumulation="hold"),
    "zero 3, shared parameters": Strategy(zero=3, share_parameters=True),
}
"""paceline's rows in every precision; in float32 the historical systems are others."""


@dataclass(frozen=True)
class StrategiesBench:
    """Step time, peak memory and bytes sent of each strategy against its peers, interleaved in one job a stage."""

    ranks: tuple[int, ...] = (2,)
    """Numbers of ranks to run with, on this machine."""
    cases: tuple[str, ...] = tuple(case.name for case in CASES)
    """Which cases to run."""
    precision: tuple[Precision, ...] = ("float32",)
    """Which precisions to compute in."""
    systems: tuple[str, ...] = ()
    """Names of the systems to run, or whole "system: setting"; default: all."""
    rounds: int = 15
    """Rounds; in each, every system runs in turn."""
    steps: int = 4
    """Steps of a system in one round."""
    json: JsonFile = ""
    """Where to write machine, versions, command and rows; - prints them, and all else goes to stderr."""


@dataclass(frozen=True)
class Measured:
    """What one system needs of a rank that runs nothing else, in bytes."""

    base: int
    """Memory before the model was built: interpreter and libraries."""
    peak: int
    sent: int
    """What it sends in one step."""


Failures = list[dict[str, Any]]
"""Systems that could not run: case, ranks, precision, system, setting, reason."""


def main(options: StrategiesBench) -> list[Row]:
    """Runs the benchmark, prints its tables and writes its file.

    Raises:
        UserError: `options.systems` names none that there is.
    """
    rows: list[Row] = []
    failures: Failures = []
    cases = [case for case in CASES if case.name in options.cases]
    with progress() as report:
        for ranks, precision, case in product(options.ranks, options.precision, cases):
            everywhere = [system for each in options.precision for system in systems(each)]
            chosen = choose(systems(precision), options.systems, everywhere)
            rows += run_case(case, ranks, precision, chosen, options.rounds, options.steps, failures, report)
            if options.json:  # each time, so that a run of hours that is cut short leaves what it has
                write_json(options.json, rows, {"failures": failures} if failures else None)
    return rows


def systems(precision: Precision) -> list[System]:
    """Everything that is compared in one precision: peers, then paceline."""
    strategies = dict(OURS)
    if precision == "float32":
        strategies |= {name: strategy for name, strategy in SYSTEMS.items() if strategy not in OURS.values()}
    else:
        for name, strategy in OURS.items():
            low = replace(strategy, precision=precision)
            del strategies[name]
            strategies[f"{name}, reduced in {precision}"] = replace(low, reduce_in_float32=False)
            strategies[f"{name}, reduced in float32"] = low
    ours = [
        System("paceline", name, partial(parallel, strategy), (GROUPS[(0, 1, 1, 2)[strategy.stage]],))
        for name, strategy in strategies.items()
    ]
    return peers(precision) + ours


def choose(found: Sequence[System], wanted: Sequence[str], others: Sequence[System] = ()) -> list[System]:
    """The systems whose name or label is `wanted`; all, if nothing is.

    Args:
        found: What to choose from.
        wanted: Names and labels.
        others: Of other precisions, which may be wanted there alone.

    Raises:
        UserError: A wanted name that no system has.
    """
    known = {name: None for system in (*found, *others) for name in (system.name, system.label)}
    for name in wanted:
        if name not in known:
            raise UserError(f"--systems: expected some of {'; '.join(known)}; got {name!r}")
    return [system for system in found if not wanted or system.name in wanted or system.label in wanted]


def run_case(
    case: Case,
    ranks: int,
    precision: Precision,
    chosen: Sequence[System],
    rounds: int,
    steps: int,
    failures: Failures,
    report: Callable[[str], None],
) -> list[Row]:
    """Measures and prints one case: a table for each group, a ratio being to the group's fastest peer.

    Each system runs alone first, which gives its memory and shows whether it runs at all; then those of a group
    take turns in one job. All of them in one would not fit in the memory of a small machine.

    Args:
        case: What to train.
        ranks: Number of ranks; they share the cores, each with as many threads.
        precision: What to compute in.
        chosen: The systems.
        rounds: Timed rounds.
        steps: Steps of a system in one round.
        failures: Gets what could not run, with the reason.
        report: Is told what is being measured.
    """
    subject = f"{case.name}, {ranks} ranks, {precision}"
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    measured: dict[str, Measured] = {}
    for number, system in enumerate(chosen, 1):
        report(f"{subject}: {system.label} alone ({number} of {len(chosen)})")
        try:
            measured[system.label] = run_ranks(ranks, _measure, case, precision, system, threads=threads)[0]
        except (RanksFailed, UserError) as error:
            reason = error.summary if isinstance(error, RanksFailed) else str(error)
            report("")
            print(f"{subject}: {system.label} did not run: {reason}")
            where = {"case": case.name, "ranks": ranks, "precision": precision}
            failures.append({**where, "system": system.name, "setting": system.setting, "reason": reason})
    rows: list[Row] = []
    for group, members in compared([system for system in chosen if system.label in measured]):
        report(f"{subject}: {group}, {len(members)} systems by turns, {rounds} rounds")
        seconds = run_ranks(ranks, _time_systems, case, precision, members, rounds, steps, threads=threads)[0]
        rivals = [system for system in members if system.name not in ("paceline", "one process")] or members
        # By the median: one slow round makes nobody slow.
        best = min(rivals, key=lambda system: statistics.median(seconds[system.label]))
        for system in members:
            need, times, reference = measured[system.label], seconds[system.label], seconds[best.label]
            row = make_row(case.name, system.name, system.setting, ranks, times, reference, need.peak, need.sent)
            rows.append(replace(row, precision=precision, group=group, base_bytes=need.base))
        report("")
        print_rows([row for row in rows if row.group == group], best.label)
    return rows


def compared(chosen: Sequence[System]) -> list[tuple[str, list[System]]]:
    """The groups that systems are compared in, but for those that say nothing that another one does not."""
    found = {group: [system for system in chosen if group in system.groups] for group in GROUPS}
    told: list[tuple[str, list[System]]] = []
    for group, members in found.items():
        labels = {system.label for system in members}
        others = [{system.label for system in other} for name, other in found.items() if name != group]
        repeated = any(labels == {system.label for system in earlier} for _, earlier in told)
        if members and not repeated and not any(labels < other for other in others):
            told.append((group, members))
    return told


def _time_systems(
    case: Case, precision: Precision, members: Sequence[System], rounds: int, steps: int
) -> dict[str, list[float]]:
    world = pl.init()
    built = {system.label: system.build(case, world, precision) for system in members}
    seconds: dict[str, list[float]] = {name: [] for name in built}
    names = list(built)
    for number in range(rounds + 1):
        # Each round starts with another system, so that none always follows the same neighbour.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            elapsed = _time(built[name], steps, world.device)
            if number:  # the first round warms up
                seconds[name].append(elapsed)
    pl.shutdown()
    return seconds


def _time(training: Training, steps: int, device: torch.device) -> float:
    """Seconds a step, of the slowest rank."""
    pl.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        training.step()
    training.settle()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elapsed = (time.perf_counter() - start) / steps
    return float(max(pl.all_gather_json(elapsed, "seconds of a step")))


def _measure(case: Case, precision: Precision, system: System) -> Measured:
    """Memory and traffic of a rank that runs one system alone."""
    for library in system.libraries:
        importlib.import_module(library)
    world = pl.init()
    # Once, as torch imports much when it is first used.
    one_process(Case("warm-up", preset("nano"), batch=1), world, precision).step()
    pl.barrier()
    base = held_bytes(world.device)
    with watching_memory(world.device) as peak:
        training = system.build(case, world, precision)
        if system.name == "paceline":
            pl.engine_of(training.model).record_events()
        for _ in range(4):
            training.step()
        # All ranks' peaks belong to the time in which all share what they share.
        pl.barrier()
        most = peak()
    pl.barrier()
    before = sent_bytes()
    training.step()
    sent = sent_since(before)
    # The rank that is done first would close the others' connections, and with them their counts.
    pl.barrier()
    if system.name == "paceline":
        # Shared memory has no sockets; the engine counts what crosses it.
        sent = sum(event.sent for event in pl.engine_of(training.model).drain_events() if event.step == 3)
    elif world.device.type == "cuda":
        # NCCL does not tell.
        sent = 0
    pl.shutdown()
    return Measured(base, most, sent)
