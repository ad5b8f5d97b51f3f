"""`paceline bench plan`: what the planner says of steps on this machine, beside steps that the engine runs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import nn

import paceline as pl
from paceline.bench.plan_rows import PlanRow, Precision, Recompute, predicted, read, summary, table, told
from paceline.bench.subject_line import progress
from paceline.calibrate.machine import SECONDS, measured_here
from paceline.calibrate.timed_pass import undisturbed
from paceline.command_line.json_file import JsonFile
from paceline.core.errors import UserError
from paceline.core.strategy import Stage, Strategy
from paceline.launch.cores import threads_per_rank
from paceline.launch.pool import RankPool
from paceline.materialise.freed import return_freed_memory
from paceline.measuring.cases import Case
from paceline.measuring.loops import one_process, parallel
from paceline.measuring.meters import held_bytes, watching_allocations, watching_memory
from paceline.measuring.results import write_json
from paceline.models.config import ModelConfig
from paceline.models.presets import preset
from paceline.plan.hardware import Hardware

SIZES = (
    Case("small", ModelConfig(layers=3, width=128, heads=4, context=128, vocabulary=2048), 4),
    Case("middle", ModelConfig(layers=4, width=320, heads=5, context=160, vocabulary=4096), 3),
    Case("large", ModelConfig(layers=6, width=448, heads=7, context=256, vocabulary=4096), 2),
)
"""None of them is among what calibration times."""

WARM = 3
"""Steps before those that are timed: the first ones after another model's took a tenth longer."""


@dataclass(frozen=True)
class PlanBench:
    """Predicted beside measured step time and peak memory of the engine on this machine."""

    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks to run with, which share the cores."""
    sizes: tuple[str, ...] = tuple(case.name for case in SIZES)
    """Which models: small, middle, large."""
    precision: tuple[Precision, ...] = ("float32", "bfloat16")
    """What is computed in."""
    recompute: tuple[Recompute, ...] = ("none", "unit")
    """What is computed again in backward."""
    zero: tuple[Stage, ...] = (0, 1, 2, 3)
    """Stages of ZeRO."""
    rounds: int = 5
    """Rounds; in each, every setting of a model runs in turn."""
    steps: int = 3
    """Steps of a setting in one round."""
    calibration: float = SECONDS
    """About how many seconds measuring the machine takes, before and after the runs of each number of ranks."""
    again: str = ""
    """File that an earlier run wrote: what it measured is predicted again, and nothing is run."""
    json: JsonFile = ""
    """Where to write machine, versions, command, the machine as it was measured, and rows; - prints them, and all else
    goes to stderr."""


def main(options: PlanBench) -> int:
    """Runs the benchmark, prints its tables and writes its file.

    Raises:
        UserError: An option names no size, `again` is no file of this benchmark, or a rank failed.
    """
    known = {case.name: case for case in SIZES}
    for name in options.sizes:
        if name not in known:
            raise UserError(f"--sizes: expected some of {', '.join(known)}, got {name!r}")
    rows: list[PlanRow] = []
    hardware: dict[int, Hardware] = {}
    if options.again:
        measured, hardware = read(options.again)
        rows = predicted(measured, hardware, known)
        print(table(rows))
        _write(options.json, rows, hardware)
    else:
        with progress() as report:
            for ranks in options.ranks:
                measured, hardware[ranks] = _ranks(options, ranks, [known[name] for name in options.sizes], report)
                rows += predicted(measured, hardware, known)
                report("")
                print(table([row for row in rows if row.ranks == ranks]), flush=True)
                _write(options.json, rows, hardware)
    print("\n".join(told(rows)))
    return 0


def _write(path: str, rows: Sequence[PlanRow], hardware: Mapping[int, Hardware]) -> None:
    if path:
        extra = {"summary": summary(rows), "hardware": {ranks: asdict(each) for ranks, each in hardware.items()}}
        write_json(path, rows, extra)


def _ranks(
    options: PlanBench, ranks: int, cases: Sequence[Case], report: Callable[[str], None]
) -> tuple[list[PlanRow], Hardware]:
    """All settings with one number of ranks: calibration, runs, calibration, so that a machine that changes shows."""
    threads = threads_per_rank(0, ranks)
    report(f"{ranks} ranks: measuring the machine")
    before = measured_here(ranks, options.calibration / 2)[0]
    rows = []
    with RankPool(ranks, threads, fresh=True) as pool:
        for case in cases:
            strategies = _strategies(options, ranks)
            report(f"{ranks} ranks: {case.name}, {len(strategies)} settings by turns")
            times = pool.run(_times, case, strategies, options.rounds, options.steps, limit=3600)[0]
            for number, (strategy, seconds) in enumerate(zip(strategies, times, strict=True)):
                report(f"{ranks} ranks: {case.name}, memory ({number + 1} of {len(strategies)})")
                held = pool.run(_memory, case, strategy, limit=600)
                rows.append(_row(case, ranks, strategy, seconds, held, before.framework))
    report(f"{ranks} ranks: measuring the machine again")
    return rows, between(before, measured_here(ranks, options.calibration / 2)[0])


def _row(
    case: Case,
    ranks: int,
    strategy: Strategy,
    seconds: Sequence[float],
    held: Sequence[tuple[int, int]],
    framework: int,
) -> PlanRow:
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return PlanRow(
        case.name,
        ranks,
        strategy.stage,
        strategy.precision,  # type: ignore[arg-type]
        strategy.recompute,
        tuple(each * 1e3 for each in seconds),
        undisturbed(seconds) * 1e3,
        (quartiles[2] - quartiles[0]) / 2 * 1e3,
        max(allocated for allocated, _ in held),
        framework + max(grown for _, grown in held),
    )


def between(first: Hardware, second: Hardware) -> Hardware:
    """What was measured before and after, in the middle."""

    def middle(a: float, b: float) -> float:
        return (a + b) / 2

    measured = {
        name: replace(
            rates,
            fixed=middle(rates.fixed, second.measured[name].fixed),
            per_flop=middle(rates.per_flop, second.measured[name].per_flop),
            per_byte=middle(rates.per_byte, second.measured[name].per_byte),
            per_block=middle(rates.per_block, second.measured[name].per_block),
        )
        for name, rates in first.measured.items()
    }
    kernels = replace(
        first.kernels,
        launch=middle(first.kernels.launch, second.kernels.launch),
        contention=middle(first.kernels.contention, second.kernels.contention),
    )
    return replace(first, measured=measured, kernels=kernels, hooks=middle(first.hooks, second.hooks))


def _strategies(options: PlanBench, ranks: int) -> list[Strategy]:
    return [
        Strategy(zero=zero, precision=precision, recompute=recompute)
        for zero in options.zero
        if zero == 0 or ranks > 1
        for precision in options.precision
        for recompute in options.recompute
    ]


def _times(case: Case, strategies: Sequence[Strategy], rounds: int, steps: int) -> list[list[float]]:
    """Seconds of a step of the slowest rank, in each round, of each setting."""
    world = pl.init(device="cpu")
    built = [parallel(strategy, case, world, "float32") for strategy in strategies]
    seconds: list[list[float]] = [[] for _ in built]
    for number in range(rounds + 1):
        # Each round starts with another, so that none always follows the same neighbour.
        order = [*range(number % len(built), len(built)), *range(number % len(built))]
        for index in order:
            pl.barrier()
            for _ in range(WARM):
                built[index].step()
            built[index].settle()
            pl.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                built[index].step()
            built[index].settle()
            elapsed = (time.perf_counter() - began) / steps
            slowest = float(max(pl.all_gather_json(elapsed)))
            if number:
                seconds[index].append(slowest)
    for each in built:
        pl.release(each.model)
    pl.shutdown()
    return seconds


def _memory(case: Case, strategy: Strategy) -> tuple[int, int]:
    """Bytes of this rank at its fullest until the end of the third step: allocated, and what its process grew by.

    What the process had before is not the setting's: the heap of one that has trained others has their gaps.
    """
    world = pl.init(device="cpu")

    def train(asked: Callable[[], int]) -> tuple[nn.Module, int]:
        training = parallel(strategy, case, world, "float32")
        pl.barrier()
        # What a model was built in is gone before a step makes what ranks share.
        most = asked()
        for _ in range(3):
            training.step()
        # All ranks' peaks belong to the time in which all share what they share.
        pl.barrier()
        return training.model, max(most, asked())

    one_process(Case("warm-up", preset("nano"), batch=1), world, "float32").step()
    gc.collect()
    return_freed_memory()
    pl.barrier()
    before = held_bytes(world.device)
    with watching_memory(world.device) as peak:
        model, most = train(peak)
    grown = most - before
    pl.barrier()
    pl.release(model)
    del model
    gc.collect()
    pl.barrier()
    # A second time, as counting takes memory of its own.
    with watching_allocations(world.device) as peak:
        model, allocated = train(peak)
    pl.barrier()
    pl.release(model)
    pl.shutdown()
    return allocated, grown
