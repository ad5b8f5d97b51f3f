"""The tables of docs/strategies.md: what each strategy sends and holds, from the schedule that the engine executes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.strategy import Strategy
from paceline.plan.models import meta_model
from paceline.plan.stages import row, shapes

MODEL, RANKS = "gpt2-124m", 8

STAGES = {
    "zero 0": Strategy(zero=0),
    "zero 1": Strategy(zero=1),
    "zero 2": Strategy(zero=2),
    "zero 3": Strategy(zero=3),
    "zero 3, shared parameters": Strategy(zero=3, share_parameters=True),
    "zero 3, shard 4": Strategy(zero=3, shard=4),
}
POLICIES = {
    f"zero {zero}, {accumulation}": Strategy(zero=zero, accumulation=accumulation)
    for zero, accumulation in (
        (0, "defer"),
        (0, "each"),
        (1, "defer"),
        (1, "each"),
        (2, "each"),
        (2, "defer"),
        (3, "each"),
        (3, "hold"),
        (3, "defer"),
    )
}
HELD = ("parameters", "gradients", "optimizer", "buckets", "gathered", "total")
"""Kinds of memory, as `paceline.core.memory.Memory` names them."""
ACCUMULATED = ("gradients", "buckets", "gathered", "total")
"""Those that accumulation changes."""


def tables() -> dict[str, str]:
    """By the name that each has in the page."""
    return {"stages": table(STAGES, 1, HELD), "accumulation": table(POLICIES, 4, ACCUMULATED)}


def table(chosen: dict[str, Strategy], micro_batches: int, kinds: Sequence[str]) -> str:
    """A line per strategy: parameters' worth of what it sends, MiB of what a rank holds in bfloat16 / in float32."""
    model = shapes(meta_model(MODEL))
    lines = ["| strategy | all-gather | reduce | " + " | ".join(kinds) + " |", "|---|" + "---:|" * (2 + len(kinds))]
    for name, strategy in chosen.items():
        low, wide = (
            row(model, replace(strategy, precision=precision), RANKS, micro_batches)
            for precision in ("bfloat16", "float32")
        )
        # There every element that is sent has four bytes.
        reduced = wide.sent["reduce_scatter"] + wide.sent["all_reduce"]
        cells = [f"{size / (4 * model.numel):.2f}" for size in (wide.sent["all_gather"], reduced)]
        for kind in kinds:
            sizes = [getattr(each.memory, kind) for each in (low, wide)]
            cells.append(" / ".join(f"{size / 2**20:,.0f}" for size in sizes) if any(sizes) else "0")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
