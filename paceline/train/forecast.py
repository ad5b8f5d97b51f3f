"""What the planner says of a run: what `plan: auto` takes, and at the end the prediction beside the measurement."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import paceline as pl
from paceline.comm.world import World
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.launch.cores import CROWDED
from paceline.models.config import ModelConfig
from paceline.plan.case import Case
from paceline.plan.hardware import Device, Hardware, Kernels, Link
from paceline.plan.recommend import in_words
from paceline.plan.run_file import setting_of, share_of
from paceline.plan.search import families, search
from paceline.plan.subject import transformer
from paceline.train.config import TrainConfig
from paceline.train.defaults import defaults
from paceline.train.metrics import peak_memory
from paceline.train.run_folder import PLAN, RunFolder

UNKNOWN = Hardware(
    Device("unknown", 1 << 62, 1.0, dict.fromkeys(("float32", "bfloat16", "float16"), 1.0), {}),
    Kernels(0.0, 1.0, 1.0, 0.0, 1.0),
    1,
    Link(0.0, 1.0),
    Link(0.0, 1.0),
)
"""Stands for machines of which nobody knows how fast they are: what a rank holds can be told nevertheless."""

DECIDED = ("zero", "shard", "recompute", "recompute_every", "accumulation", "prefetch", "bucket_mb")
"""Settings of a strategy that `plan: auto` decides, beside the micro-batch."""


@dataclass
class Forecast:
    """Collects what a run takes, beside what was predicted.

    Attributes:
        before: Bytes that this rank held before the model was built, pages of files apart.
        look: Finds its machine, if anybody measured it or knows it by name: when that is asked for, as files are read.
        steps: Seconds of a step in each interval of figures, but for the first.
        crowded: Which share of each of these other work had cores that this rank could have used.
        most: Bytes that this rank had held at most when the latest ended: what comes after training does not count.
        files: Bytes of these that were pages of files then: code of libraries as far as it has run, and the text.
    """

    before: int
    look: Callable[[], Hardware | None]
    steps: list[float] = field(default_factory=list)
    crowded: list[float] = field(default_factory=list)
    most: int = 0
    files: int = 0

    def add(self, seconds: float, crowded: float, device: torch.device) -> None:
        """An interval of figures has ended."""
        self.steps.append(seconds)
        self.crowded.append(crowded)
        self.most, self.files = peak_memory(device), _files_now(device)

    def told(self, config: TrainConfig, shape: ModelConfig, world: World, folder: RunFolder) -> list[str]:
        """Writes what was predicted beside what was measured to the run's folder; the same in lines, or none."""
        found = self.compared(config, shape, world)
        if found is None:
            return []
        folder.write_text(PLAN, json.dumps(found, indent=1) + "\n")
        return in_lines(found, world.world_size)

    def compared(self, config: TrainConfig, shape: ModelConfig, world: World) -> dict[str, Any] | None:
        """Predicted and measured step time and memory; None where the run was too short, or cannot be forecast."""
        if not self.steps:
            return None
        # Which pages of libraries a run touches nobody predicts, so these count as they were when it was measured.
        besides = self.before + self.files
        hardware = self.look()
        try:
            case = _case(hardware or UNKNOWN, shape, world)
            setting = setting_of(config, world.world_size)
            held = case.footprint(setting).peak - case.hardware.framework
            seconds = case.estimate(setting).seconds if hardware is not None else None
        except UserError:
            return None
        return {
            "strategy": asdict(config.strategy),
            "ranks": world.world_size,
            "hardware": None if hardware is None else hardware.device.name,
            "step_seconds": {"predicted": seconds, "measured": median(self.steps)},
            "crowded_fraction": median(self.crowded or [0.0]),
            "peak_bytes": {"predicted": held + besides, "measured": self.most},
            "bytes_beside_model": besides,
        }


def in_lines(found: dict[str, Any], ranks: int) -> list[str]:
    """What was predicted beside what was measured, in lines that fit a terminal."""
    step, peak = found["step_seconds"], found["peak_bytes"]
    besides = found["bytes_beside_model"]
    own = {name: size - besides for name, size in peak.items()}
    memory = f"predicted: {_mib(own['predicted'])} of memory beside the {_mib(besides)} of a bare process, measured "
    memory += f"{_mib(own['measured'])} ({_error(own)})"
    if step["predicted"] is None:
        return [
            f"{memory}; a step took {step['measured'] * 1e3:.1f} ms",
            f"    once `paceline plan --here --devices {ranks} --model tiny` has measured this machine, steps are "
            "predicted, too",
        ]
    told = f"{step['predicted'] * 1e3:.1f} ms a step, measured {step['measured'] * 1e3:.1f} ({_error(step)}"
    if found["crowded_fraction"] > CROWDED:
        # No forecast knows what else a machine does.
        told += f", while other work had the cores for {100 * found['crowded_fraction']:.0f} % of the time"
    return [memory, f"predicted: {told})"]


def begin(world: World, recomputes: bool, before: int | None = None, measured: Hardware | None = None) -> Forecast:
    """What a rank holds before the model is built, and its machine. Measures nothing.

    Args:
        world: The job.
        recomputes: Whether units will be checkpointed.
        before: What it held then, where it is there already.
        measured: The machine as the run's plan was made for it, which may be kept nowhere.
    """
    held = _held_now(world.device, recomputes) if before is None else before
    return Forecast(held, lambda: measured or known_hardware(world))


def known_hardware(world: World) -> Hardware | None:
    """The machine of a job's ranks: measured before, or by the name of its GPU."""
    if world.device.type == "cuda":
        from paceline.calibrate import gpu

        return gpu.known(world.device)
    from paceline.calibrate.machine import kept

    return kept(world.world_size, torch.get_num_threads()) if world.local_world_size == world.world_size else None


def planned(
    config: TrainConfig, shape: ModelConfig, world: World, say: Callable[[str], object]
) -> tuple[TrainConfig, Hardware]:
    """The configuration with the fastest strategy and micro-batch within memory, and on which machine it is that.

    A collective call.

    Args:
        config: What was asked for; its batch and precision stay.
        shape: The model's.
        world: The job.
        say: Is told what is done and chosen.

    Raises:
        UserError: The GPU's figures are not known, or nothing fits.
    """
    found = pl.all_gather_json(known_hardware(world) is not None, "whether this machine was measured")
    hardware = known_hardware(world) if all(found) else None
    if hardware is None and world.device.type == "cuda":
        raise UserError(
            f"plan auto: {torch.cuda.get_device_name(world.device)} is none of the GPUs that the planner knows; write "
            "its figures into a profile, let `paceline plan --hardware FILE --write run.yaml` choose, and train that"
        )
    if hardware is None:
        from paceline.calibrate.machine import SECONDS, measured_in_job

        say(f"plan: measuring this machine for about {SECONDS:.0f} s, once")
        hardware = measured_in_job(world, say)
    share, case = share_of(config.batch, world.world_size), _case(hardware, shape, world)
    looked = search(case, share, strategies=_possible(config.strategy, case))
    estimate = looked.recommended
    if estimate is None:
        nearest = looked.best[0]
        raise UserError(
            f"plan auto: nothing fits: {config.batch} samples of {shape.context} tokens over {world.world_size} "
            f"rank{'s' * (world.world_size > 1)}: {in_words(nearest)}, which misses by least, needs "
            f"{_mib(-nearest.spare)} beside the {_mib(case.capacity)} that there are; take a smaller model, a shorter "
            "context or more ranks"
        )
    # Rank 0's choice is everyone's, whatever rounding says elsewhere.
    setting = estimate.setting
    chosen = {name: value for name, value in asdict(setting.strategy).items() if name in DECIDED}
    chosen, samples = pl.all_gather_json([chosen, setting.samples], "the strategy that was planned")[0]
    say(f"plan: {in_words(estimate)}: {estimate.seconds * 1e3:.1f} ms a step predicted")
    strategy = replace(config.strategy, **chosen)
    usual = defaults(config.model.preset)
    for name in DECIDED:
        asked = getattr(config.strategy, name)
        if asked not in (getattr(usual.strategy, name), getattr(strategy, name)):
            say(f"note: strategy.{name} {asked} does not count, as plan auto decides it: {getattr(strategy, name)}")
    if config.micro_batch not in (usual.micro_batch, samples):
        say(f"note: micro_batch {config.micro_batch} does not count, as plan auto decides it: {samples}")
    return replace(config, strategy=strategy, micro_batch=samples, plan=""), hardware


def _possible(strategy: Strategy, case: Case) -> list[Strategy]:
    """Every stage and group that goes with the settings that a plan leaves as they are, such as how gradients travel.

    Raises:
        UserError: None does.
    """
    usual: dict[str, Any] = {name: getattr(Strategy, name) for name in DECIDED}
    found, wrong = list[Strategy](), None
    for family in families(case, strategy.precision):
        try:
            found.append(replace(strategy, **(usual | {"zero": family.stage, "shard": family.shard})))
        except UserError as error:
            wrong = error
    if wrong is not None and not found:
        raise wrong
    return found


def _case(hardware: Hardware, shape: ModelConfig, world: World) -> Case:
    kernels = "cuda" if world.device.type == "cuda" else "cpu"
    return Case(transformer("the model", shape, kernels=kernels), hardware, world.world_size)


def _held_now(device: torch.device, recomputes: bool) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    if recomputes:
        # What the first checkpointed unit would import.
        importlib.import_module("torch._dynamo")
    return _resident("Anon") + _resident("Shmem") or peak_memory(device)


def _files_now(device: torch.device) -> int:
    return 0 if device.type == "cuda" else _resident("File")


def _resident(kind: str) -> int:
    """Bytes of this process's resident pages of a kind, as /proc/self/status names it; 0 where there is no such."""
    try:
        found = re.search(rf"^Rss{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    except OSError:
        return 0
    return 0 if found is None else int(found[1]) * 1024


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _error(pair: dict[str, float]) -> str:
    return f"{pair['predicted'] / pair['measured'] - 1:+.1%}" if pair["measured"] > 0 else "too little to compare"
