"""A benchmark's rows: printed as a table, kept as JSON with the machine, versions and command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Row:
    """One system in one case."""

    case: str
    """What is trained, such as "communication-heavy"."""
    system: str
    setting: str
    ranks: int
    median_ms: float
    """Median over rounds of the time of one step."""
    spread_ms: float
    """Half the distance between the quartiles of that."""
    ratio: float
    """Median over rounds of this system's time to the reference's in the same round."""
    ratio_spread: float
    """Half the distance between the quartiles of that."""
    peak_bytes: int
    """The most memory that a rank held: with strategies `meters.held_bytes`, elsewhere as the benchmark says."""
    wire_bytes: int
    """Bytes that a rank sends in one step."""
    precision: str = "float32"
    """What is computed in."""
    group: str = ""
    """What it is compared with, where a benchmark compares several things."""
    base_bytes: int = 0
    """The part of `peak_bytes` that the interpreter and libraries took before the model was built, where measured."""


def half_spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return (quartiles[2] - quartiles[0]) / 2


def make_row(
    case: str,
    system: str,
    setting: str,
    ranks: int,
    seconds: Sequence[float],
    reference: Sequence[float],
    peak_bytes: int,
    wire_bytes: int,
) -> Row:
    """A row from the step times of each round and the reference's times in the same rounds."""
    ratios = [mine / theirs for mine, theirs in zip(seconds, reference, strict=True)]
    return Row(
        case,
        system,
        setting,
        ranks,
        statistics.median(seconds) * 1e3,
        half_spread(seconds) * 1e3,
        statistics.median(ratios),
        half_spread(ratios),
        peak_bytes,
        wire_bytes,
    )


def machine() -> dict[str, Any]:
    """The machine and versions that results are worth nothing without."""
    import torch

    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write_json(path: str, rows: Sequence[DataclassInstance], extra: dict[str, Any] | None = None) -> None:
    """Writes machine, versions, command and rows."""
    result = {
        "machine": machine(),
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        **(extra or {}),
        "rows": [asdict(row) for row in rows],
    }
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def print_rows(rows: Sequence[Row], reference: str) -> None:
    """Prints rows as one aligned table for each case, number of ranks, group and precision."""
    for key in dict.fromkeys(map(_table, rows)):
        chosen = [row for row in rows if _table(row) == key]
        case, ranks, group, precision = key
        title = f"{case}, {ranks} rank{'s' if ranks > 1 else ''}" + (f", {group}, {precision}" if group else "")
        width = max(len(f"{row.system}: {row.setting}") for row in chosen)
        print(f"\n{title}; ratio to {reference}, ± half the quartile distance")
        print(
            f"{'system: setting':<{width}} {'ms/step':>9} {'±':>6} {'ratio':>7} {'±':>6} {'peak MiB':>9} "
            f"{'own MiB':>9} {'sent MB':>8}"
        )
        for row in chosen:
            own = f"{(row.peak_bytes - row.base_bytes) / 2**20:.0f}" if row.base_bytes else ""
            print(
                f"{f'{row.system}: {row.setting}':<{width}} {row.median_ms:9.2f} {row.spread_ms:6.2f} "
                f"{row.ratio:7.3f} {row.ratio_spread:6.3f} {row.peak_bytes / 2**20:9.0f} {own:>9} "
                f"{row.wire_bytes / 1e6:8.2f}"
            )


def _table(row: Row) -> tuple[str, int, str, str]:
    return row.case, row.ranks, row.group, row.precision
