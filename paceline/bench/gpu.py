"""`paceline bench gpu`: one GPU in bf16, every stage beside plain and compiled PyTorch."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial

import torch

import paceline as pl
from paceline.bench.ranks import run_ranks
from paceline.bench.strategies import Failures, choose
from paceline.bench.subject_line import progress
from paceline.command_line.json_file import JsonFile
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.launch.pool import RanksFailed
from paceline.measuring.cases import GROUPS, Case, Precision, System, Training
from paceline.measuring.loops import one_process, parallel
from paceline.measuring.meters import watching_memory
from paceline.measuring.results import half_spread, write_json
from paceline.models.flops import flops_per_token, peak_flops
from paceline.models.presets import preset
from paceline.models.transformer import Transformer

PRECISION: Precision = "bfloat16"
WARM_UP = 3

SHAPES = {"gpt2-124m": (1024, 16), "llama-1b": (2048, 4)}
"""Tokens of a sequence and sequences of a step; other presets take one of their own context."""


@dataclass(frozen=True)
class GpuBench:
    """Tokens a second, MFU and peak memory of one GPU in bf16: each stage beside plain and compiled PyTorch."""

    models: tuple[str, ...] = tuple(SHAPES)
    """Model presets."""
    systems: tuple[str, ...] = ()
    """Names of the systems to run, or whole "system: setting"; default: all."""
    rounds: int = 5
    """Timed rounds of each system, which runs alone in a process."""
    steps: int = 5
    """Steps of a round."""
    json: JsonFile = ""
    """Where to write machine, versions, command and rows; - prints them, and all else goes to stderr."""


@dataclass(frozen=True)
class GpuRow:
    """One system with one model."""

    model: str
    system: str
    setting: str
    precision: str
    device: str
    """The GPU's name."""
    batch: int
    """Sequences of a step."""
    context: int
    """Tokens of a sequence."""
    median_ms: float
    """Median over rounds of the time of one step."""
    spread_ms: float
    """Half the distance between the quartiles of that."""
    host_ms: float
    """Median of the time until the host has enqueued a step."""
    tokens_per_second: float
    mfu: float | None
    """Share of the device's dense peak, of the operations that the model needs; None where the peak is not known."""
    peak_bytes: int
    """The most that was allocated at once in a step."""


@dataclass(frozen=True)
class _Case(Case):
    def build(self) -> Transformer:
        """The model, drawn on the GPU, as a billion weights take long on the CPU."""
        torch.manual_seed(0)
        with pl.init().device:
            return Transformer(self.model)


@dataclass(frozen=True)
class _Measured:
    device: str
    seconds: list[float]
    host_seconds: list[float]
    peak_bytes: int


def main(options: GpuBench) -> list[GpuRow]:
    """Runs the benchmark, prints its tables and writes its file.

    Raises:
        UserError: There is no GPU, or no such model or system.
    """
    if not torch.cuda.is_available():
        raise UserError(
            "bench gpu: torch sees no GPU (torch.cuda.is_available() is false); run it where there is one, with a "
            "torch that was built for it. paceline bench strategies measures CPUs"
        )
    return measure(options)


def measure(options: GpuBench) -> list[GpuRow]:
    """`main` on whatever device ranks take.

    Raises:
        UserError: There is no such model or system.
    """
    cases, chosen = [_case(name) for name in options.models], choose(systems(), options.systems)
    rows: list[GpuRow] = []
    failures: Failures = []
    with progress() as report:
        for case in cases:
            for number, system in enumerate(chosen, 1):
                report(f"{case.name}: {system.label} ({number} of {len(chosen)})")
                try:
                    found = run_ranks(1, _run, case, system, options.rounds, options.steps)[0]
                except (RanksFailed, UserError) as error:
                    reason = error.summary if isinstance(error, RanksFailed) else str(error)
                    report("")
                    print(f"{case.name}: {system.label} did not run: {reason}")
                    failures.append(
                        {"model": case.name, "system": system.name, "setting": system.setting, "reason": reason}
                    )
                else:
                    rows.append(_row(case, system, found))
                if options.json:  # each time, so that a run that is cut short leaves what it has
                    write_json(options.json, rows, {"failures": failures} if failures else None)
            report("")
            _print([row for row in rows if row.model == case.name])
    return rows


def systems() -> list[System]:
    """What is compared: PyTorch first."""
    stages = [Strategy(zero=stage, precision=PRECISION) for stage in (0, 1, 2, 3)]
    return [
        System("PyTorch", "plain, autocast", one_process, GROUPS),
        System("PyTorch", "compiled, autocast", partial(one_process, compiled=True), GROUPS),
        *(System("paceline", f"zero {strategy.stage}", partial(parallel, strategy), GROUPS) for strategy in stages),
        *(
            System("paceline", f"zero {strategy.stage}, compiled", partial(parallel, strategy, compiled=True), GROUPS)
            for strategy in (stages[0], stages[3])
        ),
        System("paceline", "zero 0, recording events", partial(_recording, stages[0]), GROUPS),
    ]


def _case(name: str) -> Case:
    config = preset(name)
    context, batch = SHAPES.get(name, (config.context, 1))
    return _Case(name, replace(config, context=context), batch)


def _recording(strategy: Strategy, case: Case, world: pl.World, precision: Precision) -> Training:
    training = parallel(strategy, case, world, precision)
    pl.engine_of(training.model).record_events()
    return training


def _run(case: Case, system: System, rounds: int, steps: int) -> _Measured:
    """Times one system on this rank's device."""
    on_gpu = torch.cuda.is_available()
    # By name, so that nobody is told of other GPUs.
    world = pl.init("cuda" if on_gpu else "cpu")
    training = system.build(case, world, PRECISION)
    for _ in range(WARM_UP):
        training.step()
    seconds, host_seconds = [], []
    with watching_memory(world.device) as peak:
        for _ in range(rounds):
            if on_gpu:
                torch.cuda.synchronize(world.device)
            start = time.perf_counter()
            for _ in range(steps):
                training.step()
            host_seconds.append((time.perf_counter() - start) / steps)
            training.settle()
            if on_gpu:
                torch.cuda.synchronize(world.device)
            seconds.append((time.perf_counter() - start) / steps)
        most = peak()
    name = torch.cuda.get_device_name(world.device) if on_gpu else world.device.type
    pl.shutdown()
    return _Measured(name, seconds, host_seconds, most)


def _row(case: Case, system: System, found: _Measured) -> GpuRow:
    median = statistics.median(found.seconds)
    speed = case.batch * case.model.context / median
    peak = peak_flops(found.device, PRECISION)
    return GpuRow(
        case.name,
        system.name,
        system.setting,
        PRECISION,
        found.device,
        case.batch,
        case.model.context,
        median * 1e3,
        half_spread(found.seconds) * 1e3,
        statistics.median(found.host_seconds) * 1e3,
        speed,
        None if peak is None else flops_per_token(case.model, case.model.context) * speed / peak,
        found.peak_bytes,
    )


def _print(rows: list[GpuRow]) -> None:
    if not rows:
        return
    first, width = rows[0], max(len(f"{row.system}: {row.setting}") for row in rows)
    print(f"\n{first.model}, {first.batch} x {first.context} tokens a step, {first.precision}, {first.device}")
    print(
        f"{'system: setting':<{width}} {'ms/step':>9} {'±':>6} {'host ms':>8} {'tokens/s':>10} {'MFU':>7} "
        f"{'peak MiB':>9}"
    )
    for row in rows:
        share = "unknown" if row.mfu is None else f"{100 * row.mfu:.1f} %"
        print(
            f"{f'{row.system}: {row.setting}':<{width}} {row.median_ms:9.2f} {row.spread_ms:6.2f} "
            f"{row.host_ms:8.2f} {row.tokens_per_second:10,.0f} {share:>7} {row.peak_bytes / 2**20:9,.0f}"
        )
