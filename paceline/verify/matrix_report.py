"""The matrix as tables that can be taken in at once, and as a page."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from paceline.measuring.results import machine
from paceline.verify.mixes import (
    ACCUMULATIONS,
    MICRO_BATCHES,
    RANKS,
    RECOMPUTING,
    STEPS,
    TOLERANCES,
    Cell,
    systems,
)

TITLES = {
    "float32": "In the model's own precision, run in float64",
    "bfloat16": "bfloat16, with fp32 master weights",
    "float16": "float16, with fp32 master weights",
}


def summary(cells: Sequence[Cell]) -> str:
    """How many are equal, and how much they differ at most."""
    equal = sum(cell.outcome.equal for cell in cells)
    size, norm = max(cell.size for cell in cells), max(cell.norm for cell in cells)
    return f"{equal} of {len(cells)} mixes equal, largest difference {_number(size)} (of norms {_number(norm)})"


def tables(cells: Sequence[Cell]) -> str:
    """A table for each precision: a line per strategy, a column per accumulation and recomputing."""
    return "\n\n".join(f"## {TITLES[precision]}\n\n{_table(cells, precision)}" for precision in _precisions(cells))


def _precisions(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.strategy.precision for cell in cells))


def _table(cells: Sequence[Cell], precision: str) -> str:
    chosen = [cell for cell in cells if cell.strategy.precision == precision]
    columns = [(accumulation, recompute) for accumulation in ACCUMULATIONS for recompute in RECOMPUTING]
    names = [name for name in systems() if any(cell.system == name for cell in chosen)]
    rows = [["strategy", *(f"{accumulation}, {recompute}" for accumulation, recompute in columns)]]
    for name in names:
        rows.append([name])
        for accumulation, recompute in columns:
            wanted = (name, accumulation, recompute)
            rows[-1].append(
                _entry([c for c in chosen if (c.system, c.strategy.accumulation, c.strategy.recompute) == wanted])
            )
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 1) + (":" if index else "-") for index, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _entry(cells: Sequence[Cell]) -> str:
    """The largest difference over numbers of micro-batches, or that one of them raised."""
    if not cells:
        return ""
    if any(cell.outcome.raised for cell in cells):
        return "raises"
    size = max(cell.size for cell in cells)
    return _number(size) if all(cell.outcome.equal for cell in cells) else f"**differs: {_number(size)}**"


def _number(size: float) -> str:
    return f"{size:.0e}" if size else "0"


def write_page(path: Path, cells: Sequence[Cell]) -> None:
    """Writes the page with machine, versions and command."""
    facts = machine()
    raised = dict.fromkeys(cell.outcome.raised for cell in cells if cell.outcome.raised)
    sections = [
        "# Equivalence",
        *(textwrap.fill(text, 115, break_long_words=False) for text in _introduction()),
        "\n".join(
            f"- {TITLES[p]}: **{summary([c for c in cells if c.strategy.precision == p])}**" for p in _precisions(cells)
        ),
        *(["What raised:\n\n" + "\n".join(f"- {text}" for text in raised)] if raised else []),
        tables(cells),
        "## How it was made",
        "| | |\n|---|---|\n"
        f"| command | `{shlex.join(['paceline', *sys.argv[1:]])}` |\n"
        f"| machine | {facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB |\n"
        f"| system | {facts['system']} |\n"
        f"| versions | paceline {version('paceline')}, Python {facts['python']}, torch {facts['torch']} |",
    ]
    path.write_text("\n\n".join(sections) + "\n")


def _introduction() -> list[str]:
    counts = " and ".join(map(str, MICRO_BATCHES))
    return [
        f"Training with {RANKS} ranks, compared with a plain PyTorch loop in one process that does not use paceline's "
        f"engine. The model is the nano preset's Transformer, the optimizer AdamW, for {STEPS} steps. Both get the "
        "same batches; the loss is the mean over ranks of the mean over micro-batches. On every rank and in every step "
        "are compared: parameters as each unit computes with them, losses, reduced gradients, their norm, and "
        "parameters after the update.",
        "An entry is the largest relative difference of all these but the norm, whose squares both sides sum in their "
        f"own way, over steps of {counts} micro-batches; 0 means equal bit for bit. It is empty where the settings "
        "exclude each other. Columns are accumulation (gradients reduced in **each** micro-batch; in the last only, "
        "**defer**; in each, with parameters that stay gathered, **hold**) and what is recomputed in backward.",
        f"In float64, where rounding leaves some 1e-15, what differs by at most {TOLERANCES['float32']:g} counts as "
        f"equal; in low precision {TOLERANCES['bfloat16']:g}. There the last bit of a sum can decide how a weight is "
        "rounded, so the one process sums gradients in the order of the strategy, and gradients are not clipped.",
        "`paceline verify` does the same for a model of your own: [verify.md](verify.md).",
    ]
