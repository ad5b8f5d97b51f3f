"""The tables of planning.md on which strategy is right when: the planner's own forecasts."""

from __future__ import annotations

from paceline.models.config import ModelConfig
from paceline.models.presets import PRESETS
from paceline.plan import profiles
from paceline.plan.case import Case
from paceline.plan.estimate import Estimate
from paceline.plan.run import Run
from paceline.plan.search import search
from paceline.plan.step import step_time
from paceline.plan.subject import transformer

HUNDRED = ModelConfig(layers=96, width=9216, heads=72, context=2048, vocabulary=50257)
"""98 billion parameters."""
BATCH = 2048
"""Samples of a step of it."""
TENSOR = (1, 2, 4, 8)
"""Tensor ranks; of one it is ZeRO-3 alone."""

CASES = (
    ("llama-1b", "a100", 8, 16, 2048, "DDP: right within some hundredths, but never the fastest"),
    ("llama-8b", "h100", 8, 8, 8192, "ZeRO-2: right"),
    ("llama-70b", "h100", 256, 2, 8192, "ZeRO-3: right"),
)
"""Model, hardware, devices, samples each, context, and what the rule says of it."""


def by_stage(model: str, hardware: str, devices: int, samples: int, context: int) -> dict[int, Estimate]:
    """The best of each stage over all ranks."""
    case = Case(transformer(model, PRESETS[model], context), profiles.hardware(hardware), devices)
    found = search(case, samples)
    return {each.setting.strategy.stage: each for each in found.best if not each.setting.strategy.shard}


def with_tensor_ranks(devices: int) -> dict[int, float]:
    """Seconds of a step of `HUNDRED` on H100s, by tensor ranks; without those that leave some without a sample."""
    took = {}
    for tensor in TENSOR:
        samples = BATCH * tensor // devices
        if samples:
            size = min(samples, 4)
            run = Run(
                HUNDRED,
                devices,
                size,
                samples // size,
                tensor=tensor,
                zero=3,
                recompute="unit",
                sequence_parallel=tensor > 1,
            )
            took[tensor] = step_time(run, profiles.hardware("h100")).total
    return took


def tables() -> dict[str, str]:
    """By the name that each has in the page."""
    return {"rule": _rule(), "tensor ranks": _tensor_ranks()}


def _rule() -> str:
    lines = ["| model | devices | zero 0 | zero 1 | zero 2 | zero 3 | the rule |", "|---|---|---|---|---|---|---|"]
    for model, hardware, devices, samples, context, verdict in CASES:
        found = by_stage(model, hardware, devices, samples, context)
        cells = [
            f"{each.seconds:.3g} s" if each.fits else f"misses {-each.spare / 2**30:,.0f} GiB"
            for _, each in sorted(found.items())
        ]
        where = f"{devices} {hardware.upper()}"
        lines.append(f"| {model}, {samples} samples of {context:,} each | {where} | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines)


def _tensor_ranks() -> str:
    lines = ["| devices | " + " | ".join(f"{tensor} tensor ranks" for tensor in TENSOR) + " |", "|---|" + "---|" * 4]
    lines[0] = lines[0].replace("1 tensor ranks", "ZeRO-3 alone")
    for devices in (512, 2048, 4096):
        took = with_tensor_ranks(devices)
        cells = [f"{took[tensor]:.3g} s" if tensor in took else "no sample for some" for tensor in TENSOR]
        lines.append(f"| {devices:,} H100 | {' | '.join(cells)} |")
    return "\n".join(lines)
