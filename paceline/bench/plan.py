"""`paceline bench plan`: what the planner says of steps on this machine, beside steps that the engine runs."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import paceline as pl
from paceline.bench.cases import Case
from paceline.bench.loops import one_process, parallel
from paceline.bench.meters import held_bytes, watching_memory
from paceline.bench.progress import progress
from paceline.bench.results import write_json
from paceline.calibrate.machine import SECONDS, measured_here
from paceline.calibrate.timed_pass import undisturbed
from paceline.command_line.json_file import JsonFile
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.launch.cores import threads_per_rank
from paceline.launch.pool import RankPool
from paceline.models.config import ModelConfig
from paceline.models.presets import preset
from paceline.plan.case import Case as Planned
from paceline.plan.estimate import Setting
from paceline.plan.hardware import Hardware
from paceline.plan.subject import transformer

SIZES = (
    Case("small", ModelConfig(layers=3, width=128, heads=4, context=128, vocabulary=2048), 4),
    Case("middle", ModelConfig(layers=4, width=320, heads=5, context=160, vocabulary=4096), 3),
    Case("large", ModelConfig(layers=6, width=448, heads=7, context=256, vocabulary=4096), 2),
)
"""None of them is among what calibration times."""

Recompute = Literal["none", "unit", "keep_attention"]


@dataclass(frozen=True)
class PlanBench:
    """Predicted beside measured step time and peak memory of the engine on this machine."""

    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks to run with, which share the cores."""
    sizes: tuple[str, ...] = tuple(case.name for case in SIZES)
    """Which models: small, middle, large."""
    precision: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """What is computed in."""
    recompute: tuple[Recompute, ...] = ("none", "unit")
    """What is computed again in backward."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """Stages of ZeRO."""
    rounds: int = 5
    """Rounds; in each, every setting of a model runs in turn."""
    steps: int = 3
    """Steps of a setting in one round."""
    calibration: float = SECONDS
    """About how many seconds measuring the machine takes, before and after the runs of each number of ranks."""
    json: JsonFile = ""
    """Where to write machine, versions, command and rows; - prints them, and all else goes to stderr."""


@dataclass(frozen=True)
class PlanRow:
    """One setting.

    Attributes:
        size: Name of the model.
        ranks: How many.
        strategy: Stage, precision, recomputation.
        measured_ms: A step of the slowest rank, the lower quartile of the rounds.
        spread_ms: Half of what lies between the quartiles.
        predicted_ms: The planner's.
        measured_bytes: What a rank held at its fullest beyond what it held before the model was built.
        predicted_bytes: The planner's, of the fullest moment.
    """

    size: str
    ranks: int
    zero: int
    precision: str
    recompute: str
    measured_ms: float
    spread_ms: float
    predicted_ms: float
    measured_bytes: int
    predicted_bytes: int

    @property
    def time_error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def memory_error(self) -> float:
        """The same of the memory."""
        return self.predicted_bytes / self.measured_bytes - 1


def main(options: PlanBench) -> int:
    """Runs the benchmark, prints its tables and writes its file.

    Raises:
        UserError: An option names no size, or a rank failed.
    """
    known = {case.name: case for case in SIZES}
    for name in options.sizes:
        if name not in known:
            raise UserError(f"--sizes: expected some of {', '.join(known)}, got {name!r}")
    rows: list[PlanRow] = []
    with progress() as report:
        for ranks in options.ranks:
            rows += _ranks(options, ranks, [known[name] for name in options.sizes], report)
            report("")
            print(_table([row for row in rows if row.ranks == ranks]), flush=True)
            if options.json:
                write_json(options.json, rows, {"summary": summary(rows)})
    print("\n".join(_told(rows)))
    return 0


def _ranks(options: PlanBench, ranks: int, cases: Sequence[Case], report: Callable[[str], None]) -> list[PlanRow]:
    """All settings with one number of ranks: calibration, runs, calibration, so that a machine that changes shows."""
    threads = threads_per_rank(0, ranks)
    report(f"{ranks} ranks: measuring the machine")
    before = measured_here(ranks, options.calibration / 2)
    found: list[tuple[Case, Strategy, list[float], int]] = []
    with RankPool(ranks, threads, fresh=True) as pool:
        for case in cases:
            strategies = _strategies(options, ranks)
            report(f"{ranks} ranks: {case.name}, {len(strategies)} settings by turns")
            times = pool.run(_times, case, strategies, options.rounds, options.steps, limit=3600)[0]
            for number, strategy in enumerate(strategies):
                report(f"{ranks} ranks: {case.name}, memory ({number + 1} of {len(strategies)})")
                (peak, *_) = pool.run(_memory, case, strategy, limit=600)
                found.append((case, strategy, times[number], peak))
    report(f"{ranks} ranks: measuring the machine again")
    hardware = between(before, measured_here(ranks, options.calibration / 2))
    return [_row(hardware, ranks, *each) for each in found]


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
    stages = [zero for zero in options.zero if zero == 0 or ranks > 1]
    chosen: list[dict[str, Any]] = [
        {"zero": zero, "precision": precision, "recompute": recompute}
        for zero in stages
        for precision in options.precision
        for recompute in options.recompute
    ]
    return [Strategy(**each) for each in chosen]


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


def _memory(case: Case, strategy: Strategy) -> int:
    """Bytes that a rank held at its fullest in its third step, beyond those before the model was built."""
    world = pl.init(device="cpu")
    one_process(Case("warm-up", preset("nano"), batch=1), world, "float32").step()
    _give_back()
    pl.barrier()
    base = held_bytes(world.device)
    with watching_memory(world.device) as peak:
        training = parallel(strategy, case, world, "float32")
        for _ in range(3):
            training.step()
        pl.barrier()
        most = peak() - base
    pl.release(training.model)
    pl.shutdown()
    return most


def _give_back() -> None:
    """Lets the kernel have the memory that models before have left to malloc, which the next one would take unseen."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _row(
    hardware: Hardware, ranks: int, case: Case, strategy: Strategy, seconds: Sequence[float], peak: int
) -> PlanRow:
    planned = Planned(transformer(case.name, case.model, kernels="cpu"), hardware, ranks)
    estimate = planned.estimate(Setting(strategy, case.batch, 1))
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return PlanRow(
        case.name,
        ranks,
        strategy.stage,
        strategy.precision,
        strategy.recompute,
        undisturbed(seconds) * 1e3,
        (quartiles[2] - quartiles[0]) / 2 * 1e3,
        estimate.seconds * 1e3,
        peak,
        estimate.memory.peak - hardware.framework,
    )


def summary(rows: Sequence[PlanRow]) -> dict[str, Any]:
    """Errors over all rows, and how much slower the planner's choice is than the fastest that was run.

    A choice is among the settings of one model, number of ranks and precision.
    """
    times, sizes = [abs(row.time_error) for row in rows], [abs(row.memory_error) for row in rows]
    groups: dict[tuple[str, int, str], list[PlanRow]] = {}
    for row in rows:
        groups.setdefault((row.size, row.ranks, row.precision), []).append(row)
    lost = [
        min(group, key=lambda row: row.predicted_ms).measured_ms / min(row.measured_ms for row in group) - 1
        for group in groups.values()
        if len(group) > 1
    ]
    return {
        "rows": len(rows),
        "time_error_mean": statistics.mean(times),
        "time_error_median": statistics.median(times),
        "memory_error_mean": statistics.mean(sizes),
        "memory_error_most": max(sizes),
        "choices": len(lost),
        "choice_lost_mean": statistics.mean(lost) if lost else 0.0,
        "choice_lost_most": max(lost, default=0.0),
        "choices_within_3_percent": sum(each <= 0.03 for each in lost),
    }


_HEADER = (
    f"{'model':<8}{'ranks':>6}{'zero':>6}  {'precision':<10}{'recompute':<15}{'measured ms':>12}{'+-':>8}"
    f"{'predicted':>11}{'error':>8}{'measured MiB':>14}{'predicted':>11}{'error':>8}"
)


def _table(rows: Sequence[PlanRow]) -> str:
    lines = [
        f"{row.size:<8}{row.ranks:>6}{row.zero:>6}  {row.precision:<10}{row.recompute:<15}{row.measured_ms:>12.2f}"
        f"{row.spread_ms:>8.2f}{row.predicted_ms:>11.2f}{row.time_error:>8.1%}{row.measured_bytes / 2**20:>14.2f}"
        f"{row.predicted_bytes / 2**20:>11.2f}{row.memory_error:>8.1%}"
        for row in rows
    ]
    return "\n".join([_HEADER, *lines])


def _told(rows: Sequence[PlanRow]) -> list[str]:
    found = summary(rows)
    return [
        "",
        f"step time: mean error {found['time_error_mean']:.1%}, median {found['time_error_median']:.1%} "
        f"of {found['rows']} settings",
        f"peak memory: mean error {found['memory_error_mean']:.1%}, at most {found['memory_error_most']:.1%}",
        f"the planner's choice was within 3 % of the fastest in {found['choices_within_3_percent']} of "
        f"{found['choices']}, and slower by {found['choice_lost_mean']:.1%} on average, "
        f"{found['choice_lost_most']:.1%} at most",
    ]
