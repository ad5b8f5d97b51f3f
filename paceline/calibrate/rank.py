"""What one rank measures, while the others of its host measure the same: they share cores, caches and memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import paceline as pl
from paceline.calibrate.engine_ops import engine_ops
from paceline.calibrate.rates import line, rates
from paceline.calibrate.repeated import BEYOND_CACHES, least
from paceline.calibrate.timed_pass import clock, timed_pass, undisturbed
from paceline.comm.connect import open_transport
from paceline.comm.transport import Transport
from paceline.comm.world import World
from paceline.core.strategy import Stage, Strategy
from paceline.launch.cores import available_cores, waited_for_a_core
from paceline.materialise.freed import keep_freed_memory, return_freed_memory
from paceline.measuring.cases import Case, Precision
from paceline.measuring.loops import one_process, parallel
from paceline.measuring.meters import held_bytes
from paceline.models.config import ModelConfig
from paceline.models.transformer import Transformer
from paceline.plan.hardware import Rates

DTYPES: tuple[Precision, ...] = ("float32", "bfloat16")

SHAPES: tuple[tuple[ModelConfig, int], ...] = (
    (ModelConfig(layers=1, width=96, heads=3, context=96, vocabulary=1024), 2),
    (ModelConfig(layers=1, width=256, heads=4, context=128, vocabulary=2048), 4),
    (ModelConfig(layers=1, width=512, heads=8, context=192, vocabulary=4096), 2),
    (ModelConfig(layers=1, width=384, heads=6, context=48, vocabulary=2048), 1),
    (
        ModelConfig(
            layers=1, width=192, heads=6, ff=512, context=128, vocabulary=1024,
            norm="rmsnorm", position="rotary", activation="swiglu", bias=False, tied=False,
        ),
        4,
    ),
)  # fmt: skip
"""Models and batches whose operators are timed: of several sizes, with every part that the reference model has."""

SMALLEST = ModelConfig(layers=3, width=16, heads=2, context=8, vocabulary=32)

EMPTY = Case("smallest", SMALLEST, 1)
"""What the engine trains, to see what an op takes of the host."""

PROBE = Case("calibration", ModelConfig(layers=4, width=224, heads=4, context=112, vocabulary=1536), 3)
"""What the engine trains, to see how much slower computing is in steps than by itself, and beside collectives."""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
"""Bytes of the buffers that collectives are timed on."""

LARGE = 4 << 20
"""Bytes of the smallest buffer of which a step leaves next to nothing in a core's caches before it is sent."""


_SLOW = 0.1
"""Seconds of a product from which on its size is no matter: bfloat16 without instructions for it, on older CPUs."""


_ENOUGH = 1.0
"""Seconds of the engine's steps, of all strategies, for each time that they would be repeated."""


class Measured(NamedTuple):
    """What one rank found."""

    rates: dict[str, Rates]
    launch: float
    """Seconds of the host for each operator, beside the operator."""
    ceiling: dict[str, float]
    bandwidth: float
    framework: int
    smallest: float
    """Seconds of the engine's step on a model that computes next to nothing."""
    steps: dict[str, dict[Stage, float]]
    """Seconds of the engine's steps on `PROBE`, by precision and stage: in float32 of all stages."""
    crowded: float = 0.0
    """Share of the time in which other work had the core that this rank could have computed on."""


def measure(seconds: float) -> Measured:
    """Measures for about so long on a quiet machine, as one rank of a job that is only for that."""
    measured = measure_in(pl.init(device="cpu"), seconds)
    pl.barrier()
    pl.shutdown()
    return measured


def measure_in(world: World, seconds: float) -> Measured:
    """Measures as one rank of a job. A collective call.

    Args:
        world: The job, between CPUs.
        seconds: Sets how often each is repeated: about so long it takes on a quiet machine.
    """
    keep_freed_memory()
    began, waited = time.perf_counter(), waited_for_a_core()
    framework = _framework(world)
    repeats = max(3, round(seconds / 3))
    found, launch = _operators(repeats)
    ceiling: dict[str, float] = {dtype: _ceiling(getattr(torch, dtype), repeats) for dtype in DTYPES}
    found |= engine_ops(repeats, [config for config, _ in SHAPES])
    crowding = _crowding(world)
    found, launch = _slower(found, crowding), launch * crowding
    if world.world_size > 1:
        found |= _collectives(world, repeats)
    (smallest,) = _engine([Strategy()], EMPTY, world, 5 * repeats)
    stages: tuple[Stage, ...] = (0, 1, 2, 3) if world.world_size > 1 else (0,)
    plain = [Strategy(zero=stage) for stage in stages]
    *whole, half = _engine([*plain, Strategy(precision="bfloat16")], PROBE, world, 2 * repeats)
    steps: dict[str, dict[Stage, float]] = {
        "float32": dict(zip(stages, whole, strict=True)),
        "bfloat16": {0: half},
    }
    bandwidth = _bandwidth(repeats)
    crowded = _by_others((waited_for_a_core() - waited) / (time.perf_counter() - began), crowding)
    return Measured(found, launch, ceiling, bandwidth, framework, smallest, steps, crowded)


def _crowding(world: World) -> float:
    """How many times as long as on a core of its own computing takes where ranks of one thread are more than cores."""
    return max(1.0, world.local_world_size / available_cores()) if clock() is time.thread_time else 1.0


def _by_others(waited: float, crowding: float) -> float:
    """In which share of the time other work had the core that a rank waited for; ranks wait for each other, too."""
    return max(0.0, 1 - (1 - waited) * crowding)


def _slower(found: Mapping[str, Rates], share: float) -> dict[str, Rates]:
    return {name: Rates(*(share * part for part in astuple(rates))) for name, rates in found.items()}


def _framework(world: World) -> int:
    """Bytes of a process that has trained, without what it trained: libraries, and what those of matmuls keep.

    Of one model in each precision: oneDNN keeps 10 MiB and more of kernels that it compiles for bfloat16's shapes.
    """
    for precision in DTYPES:
        one_process(PROBE, world, precision).step()
    gc.collect()
    return_freed_memory()
    return held_bytes(world.device)


def _operators(repeats: int) -> tuple[dict[str, Rates], float]:
    calls = []
    for dtype in DTYPES:
        for config, batch in SHAPES:
            torch.manual_seed(0)
            model = Transformer(config).to(getattr(torch, dtype))
            tokens = torch.randint(0, config.vocabulary, (batch, config.context))
            pl.barrier()
            calls += timed_pass(model, (tokens, tokens), repeats, enough=repeats / len(SHAPES)).calls
    return rates(calls), _beside_operators(5 * repeats)


def _beside_operators(repeats: int) -> float:
    """Seconds of Python, autograd and hooks for each operator, seen where operators take next to nothing."""
    model = Transformer(SMALLEST)
    tokens = torch.zeros(1, SMALLEST.context, dtype=torch.int64)
    found = timed_pass(model, (tokens, tokens), repeats)
    counted = sum(each.operation.count for each in found.calls)
    inside = sum(each.seconds * each.operation.count for each in found.calls)
    return max(0.0, (found.seconds - inside) / counted)


def _ceiling(dtype: torch.dtype, repeats: int) -> float:
    """Floating-point operations a second of the best of some products, of the kinds that a layer's passes have.

    Where one takes long on any rank no larger ones are tried. A collective call.
    """
    best, longest = 0.0, 0.0
    for rows, inner, columns in ((512, 512, 512), (1024, 1024, 1024), (512, 1024, 2048)):
        left, right = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
        turned_left, turned_right = left.t().contiguous().t(), right.t().contiguous().t()
        for pair in ((left, turned_right), (left, right), (turned_left, right)):
            seconds = least(partial(torch.mm, *pair), repeats)
            best, longest = max(best, 2 * rows * inner * columns / seconds), max(longest, seconds)
        if max(pl.all_gather_json(longest, "how long products take")) > _SLOW:
            break
    return best


def _bandwidth(repeats: int) -> float:
    source = torch.ones(1 << 24)
    target = torch.empty_like(source)
    return 2 * source.nbytes / least(partial(target.copy_, source), repeats)


def _collectives(world: World, repeats: int) -> dict[str, Rates]:
    transport = open_transport(world)
    found = {}
    try:
        buffer = transport.allocate(max(SIZES) // 4, torch.float32)
        token = transport.allocate(1, torch.float32)
        for name in COLLECTIVES:
            times = [_collective(transport, name, buffer[: size // 4], repeats) for size in SIZES]
            found[f"{name} {world.world_size}"] = line([0.0] * len(SIZES), SIZES, times)
        meet = _collective(transport, "barrier", token, repeats)
        found[f"barrier {world.world_size}"] = Rates(meet)
    finally:
        transport.close()
    return found


def _collective(transport: Transport, name: str, buffer: Tensor, repeats: int) -> float:
    """Seconds of a collective on the slowest rank of each call; a large buffer is not in the caches, as in a step."""
    others = torch.ones(BEYOND_CACHES // 4) if buffer.nbytes >= LARGE else buffer[:0]
    times = []
    for number in range(repeats + 1):
        others.add_(1)
        pl.barrier()
        began = time.perf_counter()
        transport.run(name, buffer, "calibration")
        if number:
            times.append(time.perf_counter() - began)
    return undisturbed(*_slowest([times]))


def _engine(strategies: Sequence[Strategy], case: Case, world: World, repeats: int) -> list[float]:
    """Seconds of a step of the slowest rank, with each strategy by turns: what disturbs for a while disturbs all.

    Two rounds make memory and connections. Of steps that take long one does, and fewer are enough.
    """
    trainings = [parallel(strategy, case, world, "float32") for strategy in strategies]
    times: list[list[float]] = [[] for _ in trainings]
    makes, rounds = [2] * len(trainings), [repeats + 2] * len(trainings)
    for number in range(repeats + 2):
        for training, found, most in zip(trainings, times, rounds, strict=True):
            if number >= most:
                continue
            pl.barrier()
            began = time.perf_counter()
            for _ in range(2):
                training.step()
            training.settle()
            found.append((time.perf_counter() - began) / 2)
        if number == 0:
            room = _ENOUGH * repeats / len(trainings)
            for index, (first,) in enumerate(_slowest(times)):
                if 2 * first * rounds[index] > room:
                    makes[index] = 1
                    rounds[index] = 1 + max(1, min(repeats, int(room / first / 2)))
    for training in trainings:
        pl.release(training.model)
    return [undisturbed(each[make:]) for each, make in zip(_slowest(times), makes, strict=True)]


def _slowest(times: list[list[float]]) -> list[list[float]]:
    """Of several lists of times, alike on every rank, those of the slowest rank each time."""
    everyone: Sequence[list[list[float]]] = pl.all_gather_json(times)
    return [[max(each) for each in zip(*of_one, strict=True)] for of_one in zip(*everyone, strict=True)]
