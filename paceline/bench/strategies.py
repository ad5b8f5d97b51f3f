"""`paceline bench strategies`: every way to synchronise gradients beside PyTorch's DDP, in one job."""

from __future__ import annotations

import inspect
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.bench.ranks import run_ranks
from paceline.bench.results import Row, make_row, print_rows, write_json
from paceline.models.config import ModelConfig
from paceline.models.transformer import Transformer
from paceline.strategy import SYSTEMS, Strategy


@dataclass(frozen=True)
class Case:
    """A model and what one rank gives it in a step."""

    name: str
    model: ModelConfig
    batch: int
    """Sequences a rank."""


CASES = (
    Case("communication-heavy", ModelConfig(layers=6, width=512, heads=8, context=64, vocabulary=2048), 1),
    Case("compute-heavy", ModelConfig(layers=6, width=384, heads=6, context=256, vocabulary=2048), 4),
    Case("tiny", ModelConfig(layers=3, width=128, heads=4, context=128, vocabulary=2048), 4),
)


@dataclass(frozen=True)
class StrategiesBench:
    """Step time, peak memory and bytes sent of each strategy, beside torch DDP, interleaved in one job."""

    ranks: tuple[int, ...] = (2,)
    """Numbers of ranks to run with, on this machine."""
    cases: tuple[str, ...] = tuple(case.name for case in CASES)
    """Which cases to run."""
    rounds: int = 15
    """Rounds; in each, every system runs in turn."""
    steps: int = 4
    """Steps of a system in one round."""
    json: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Where to write machine, versions, command and rows."""


Step = Callable[[], None]


def main(options: StrategiesBench) -> list[Row]:
    """Runs the benchmark, prints its tables and writes its file."""
    rows: list[Row] = []
    for ranks in options.ranks:
        for case in CASES:
            if case.name in options.cases:
                rows += run_case(case, ranks, options.rounds, options.steps)
                print_rows([row for row in rows if (row.case, row.ranks) == (case.name, ranks)], "the best DDP")
    if options.json:
        write_json(options.json, rows)
    return rows


def run_case(case: Case, ranks: int, rounds: int, steps: int) -> list[Row]:
    """Measures all systems on one case."""
    seconds = run_ranks(ranks, _time_systems, case, rounds, steps)[0]
    best = min((name for name in seconds if name[0] == "torch DDP"), key=lambda name: sum(seconds[name]))
    rows = []
    for name, times in seconds.items():
        peak, wire = run_ranks(ranks, _measure_memory, case, name)[0]
        rows.append(make_row(case.name, name[0], name[1], ranks, times, seconds[best], peak, wire))
    return rows


def systems(device: torch.device) -> dict[tuple[str, str], Callable[[nn.Module], nn.Module]]:
    """What is compared, by (system, setting): each makes a model data-parallel."""
    best: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True}
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel.__init__).parameters:
        best["batched_grad_copy"] = True
    found: dict[tuple[str, str], Callable[[nn.Module], nn.Module]] = {
        ("one process", "no communication"): lambda model: model.to(device),
        ("torch DDP", "default"): lambda model: DistributedDataParallel(model.to(device)),
        ("torch DDP", "views, static graph"): lambda model: DistributedDataParallel(
            model.to(device), gradient_as_bucket_view=True, static_graph=True
        ),
        ("torch DDP", ", ".join(best).replace("_", " ")): lambda model: DistributedDataParallel(
            model.to(device), **best
        ),
    }
    for name, strategy in SYSTEMS.items():
        found["paceline", name] = _parallelizer(strategy)
    return found


def _parallelizer(strategy: Strategy) -> Callable[[nn.Module], nn.Module]:
    return lambda model: pl.parallelize(model, strategy)


def _batch(case: Case, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shape = (case.batch, case.model.context)
    inputs, targets = (torch.randint(0, case.model.vocabulary, shape, generator=generator) for _ in range(2))
    return inputs.to(device), targets.to(device)


def _build(case: Case, parallel: Callable[[nn.Module], nn.Module], world: pl.World) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model = parallel(Transformer(case.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = _batch(case, world.rank, world.device)

    def step() -> None:
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _time_systems(case: Case, rounds: int, steps: int) -> dict[tuple[str, str], list[float]]:
    world = pl.init()
    built = {name: _build(case, parallel, world)[1] for name, parallel in systems(world.device).items()}
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in built}
    names = list(built)
    for number in range(rounds + 1):
        # Each round starts with another system, so that none always follows the same neighbour.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            elapsed = _time(built[name], steps, world.device)
            if number:  # the first round warms up
                seconds[name].append(elapsed)
    pl.shutdown()
    return seconds


def _time(step: Step, steps: int, device: torch.device) -> float:
    """Seconds a step, of the slowest rank."""
    pl.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elapsed = (time.perf_counter() - start) / steps
    return float(max(pl.all_gather_json(elapsed)))


def _measure_memory(case: Case, name: tuple[str, str]) -> tuple[int, int]:
    """Peak memory of a rank that runs nothing else, and the bytes it sends in a step."""
    world = pl.init()
    model, step = _build(case, systems(world.device)[name], world)
    for _ in range(3):
        step()
    if world.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(world.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if name[0] == "paceline":
        events = [event for event in pl.engine_of(model).drain_events() if event.step == 2]
        wire = sum(event.sent for event in events)
    elif name[0] == "torch DDP":
        # Gloo and NCCL do not tell; a ring all-reduce of the gradients sends this much.
        size = sum(p.numel() * p.itemsize for p in model.parameters())
        wire = 2 * (world.world_size - 1) * size // world.world_size
    else:
        wire = 0
    pl.shutdown()
    return peak, wire
