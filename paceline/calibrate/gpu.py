"""This machine's GPU as hardware for plans: what was measured of it, with the links of its datasheet."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

import paceline as pl
from paceline.calibrate.kept import folder, keep, taken
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.launch.cores import threads_per_rank
from paceline.launch.pool import RankPool, RanksFailed
from paceline.measuring.cases import Case
from paceline.models.config import ModelConfig
from paceline.models.on_meta import on_meta
from paceline.models.transformer import Transformer
from paceline.plan import profile_file, profiles
from paceline.plan.hardware import Hardware
from paceline.plan.trace import trace
from paceline.plan.work import Operation

SECONDS = 20.0
"""About how long it takes, most of it to start."""

DTYPES = ("float32", "bfloat16", "float16")
SIZES = (4096, 8192)
"""Of the square matrices whose products tell the ceiling: the larger is not always the faster."""
COPIED = 1 << 30
"""Bytes, many times what caches hold."""

LAUNCHES = Case("launches", ModelConfig(layers=12, width=64, heads=2, context=16, vocabulary=128), 1)
"""A model so narrow that its operations take the GPU less than the host takes to launch them."""
LONG = Case("attention", ModelConfig(layers=1, width=2048, heads=16, context=4096, vocabulary=128), 2)
"""The model whose attention is timed: 4,096 tokens, heads of 128."""

LIMIT = 300.0
"""Seconds until a GPU that gives no answer is given up."""

_ROUNDS, _STRETCH = 5, 0.03
"""Stretches that are timed, the best of which counts, and the seconds of each."""


class Measured(NamedTuple):
    """What a GPU was seen to do; rates are per second."""

    ceiling: dict[str, float]
    bandwidth: float
    attention: float
    """Floating-point operations of `LONG`'s attention in bfloat16, forward and backward together."""
    launch: float
    """Seconds of the host for an operation of `LAUNCHES`, the engine's hooks among them."""


def here(*, report: Callable[[str], object] = lambda _: None) -> Hardware:
    """This machine's GPU: measured once, then kept in the user's cache.

    Args:
        report: Is told what is being done, and why a kept measurement is not used.

    Raises:
        UserError: Measuring failed, or the planner knows of no links of such a GPU.
    """
    sheet = _by_name()
    if sheet is None:
        raise UserError(
            f"--here: {torch.cuda.get_device_name()} is none of the GPUs whose links the planner knows "
            f"({', '.join(profiles.names())}); write its figures into a profile, and plan with --hardware FILE"
        )
    path = _path()
    return taken(path, report) or _measured_and_kept(sheet, path, report)


def known(device: torch.device | None = None) -> Hardware | None:
    """This machine's GPU, the current one by default: as it was measured, or else by its name's packaged profile."""
    return taken(_path(device)) or _by_name(device)


def _by_name(device: torch.device | None = None) -> Hardware | None:
    name = torch.cuda.get_device_name(device).lower()
    short = next((each for each in sorted(profiles.names(), key=len, reverse=True) if each in name), None)
    return None if short is None else profiles.hardware(short)


def measured(sheet: Hardware, memory: int, found: Measured) -> Hardware:
    """A datasheet's hardware with what was measured, and the bytes there are, in the place of what it promises."""
    device = replace(sheet.device, memory=memory, bandwidth=found.bandwidth, ceiling=found.ceiling)
    kernels = replace(
        sheet.kernels,
        launch=found.launch,
        memory_efficiency=1.0,
        attention_efficiency=found.attention / found.ceiling["bfloat16"],
    )
    return replace(sheet, device=device, kernels=kernels, source=f"measured on this machine; {sheet.source}")


def measure(device: str = "cuda") -> Measured:
    """Measures as a job of one rank."""
    world = pl.init(device=device)
    found = Measured(
        {dtype: _ceiling(getattr(torch, dtype), world.device) for dtype in DTYPES},
        _bandwidth(world.device),
        _attention(world.device),
        _launch(world),
    )
    pl.shutdown()
    return found


def _measured_and_kept(sheet: Hardware, path: Path, report: Callable[[str], object]) -> Hardware:
    report(f"measuring this machine's GPU, about {SECONDS:.0f} s")
    try:
        with RankPool(1, threads_per_rank(0, 1), fresh=True) as pool:
            (found,) = pool.run(measure, limit=LIMIT)
    except RanksFailed as failed:
        raise UserError(f"measuring this machine's GPU failed: {failed.summary}") from None
    hardware = measured(sheet, torch.cuda.get_device_properties().total_memory, found)
    keep(path, hardware, report)
    return hardware


def _path(device: torch.device | None = None) -> Path:
    described = json.dumps([torch.cuda.get_device_name(device), torch.__version__, profile_file.VERSION])
    return folder() / f"gpu-{hashlib.sha256(described.encode()).hexdigest()[:16]}.json"


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call among many that the device has queued."""

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for _ in range(3):
        run()
    began = wait()
    run()
    calls = max(1, round(_STRETCH / max(wait() - began, 1e-6)))
    times = []
    for _ in range(_ROUNDS):
        began = wait()
        for _ in range(calls):
            run()
        times.append((wait() - began) / calls)
    return min(times)


def _ceiling(dtype: torch.dtype, device: torch.device) -> float:
    rates = []
    for size in SIZES:
        # Zeros draw less power than what a model has, and are multiplied faster.
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        rates.append(2 * size**3 / _seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device))  # type: ignore[misc]
    return max(rates)


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(COPIED // 4, device=device)
    out = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: out.copy_(source), device)


def _operations(case: Case) -> list[Operation]:
    work = trace(on_meta(lambda: Transformer(case.model)), case.batch, precision="bfloat16", device="cuda")
    return [operation for unit in work.units for operation in (*unit.forward, *unit.backward)]


def _attention(device: torch.device) -> float:
    flops = sum(each.flops * each.count for each in _operations(LONG) if each.kind == "attention")
    shape = (LONG.batch, LONG.model.heads, LONG.model.context, LONG.model.head_width)
    gradient = torch.randn(shape, device=device, dtype=torch.bfloat16)
    query, key, value = (torch.randn_like(gradient, requires_grad=True) for _ in range(3))

    def both() -> None:
        out = scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    return flops / _seconds(both, device)


def _launch(world: pl.World) -> float:
    model = pl.parallelize(LAUNCHES.build(), Strategy(precision="bfloat16"))
    inputs, targets = LAUNCHES.data(0, world.device)

    def both() -> None:
        model(inputs, targets).backward()
        model.zero_grad()

    return _seconds(both, world.device) / sum(each.count for each in _operations(LAUNCHES))
