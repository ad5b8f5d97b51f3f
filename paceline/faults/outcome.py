"""What is wrong with a run that was disturbed, beside one that was not. Reads files, starts nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.folder import CHECKPOINTS, checkpoints_in, read_manifest
from paceline.checkpoint.manifest import DamagedError
from paceline.checkpoint.reader import Reader
from paceline.core.errors import UserError
from paceline.train.run_folder import METRICS

ROUNDING = 2e-3
"""Relative difference of figures whose sums were rounded in another order, some hundred steps on. Those of a step that
has other samples differ by more than ten times as much."""

Curve = Mapping[int, tuple[float, ...]]
"""Figures of each step."""


@dataclass(frozen=True)
class Job:
    """One of the jobs that a run went on in.

    Attributes:
        ranks: How many.
        after: The step that it went on from.
        seconds: Since the job before was left; None where that was another command's.
    """

    ranks: int
    after: int
    seconds: float | None


def lines(run: Path) -> list[dict[str, Any]]:
    """A run's metrics, but for a line that is half written."""
    path = run / METRICS
    found = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def curve(run: Path) -> dict[int, tuple[float, ...]]:
    """Loss and gradient norm by step; of a step that was repeated, the last."""
    return {
        int(line["step"]): (line["train/loss"], line["train/grad_norm"]) for line in lines(run) if "train/loss" in line
    }


def jobs(run: Path) -> list[Job]:
    """Every job that went on with the run, without its first."""
    return [
        Job(int(line["run/ranks"]), int(line["run/resumed_from"]), line.get("run/interrupted_seconds"))
        for line in lines(run)
        if "run/ranks" in line
    ]


def wrong_with_curve(found: Curve, expected: Curve, rounding: bool = False, unlogged: Iterable[int] = ()) -> list[str]:
    """Steps that are missing, that nobody asked for, or whose figures are not the same.

    A step's samples follow from the seed and the step alone, so that one that was lost or seen twice shows here.

    Args:
        found: Of the disturbed run.
        expected: Of the other.
        rounding: Whether figures may differ by rounding, as where other ranks went on; else they are the same to the
            bit.
        unlogged: Steps that ranks had done, and did not come to log, before one of them was lost.
    """
    wrong = []
    if missing := sorted(expected.keys() - found.keys() - set(unlogged)):
        wrong.append(f"steps {_some(missing)} are missing")
    if more := sorted(found.keys() - expected.keys()):
        wrong.append(f"steps {_some(more)} are not of this run")
    close = 0.0 if not rounding else ROUNDING
    other = [
        step
        for step in sorted(expected.keys() & found.keys())
        if not all(math.isclose(a, b, rel_tol=close) for a, b in zip(found[step], expected[step], strict=True))
    ]
    if other:
        step = other[0]
        wrong.append(f"step {step}: {found[step]}, undisturbed {expected[step]}; {len(other)} steps differ")
    return wrong


def wrong_with_checkpoints(run: Path) -> list[str]:
    """Nothing if the latest checkpoint or the one before is whole, every byte of it read."""
    try:
        newest = checkpoints_in(run / CHECKPOINTS)[:2]
    except UserError as error:
        return [str(error)]
    told = []
    for path in newest:
        try:
            reader = Reader(path, (manifest := read_manifest(path)).tensors)
            for name in manifest.tensors:
                for _ in reader.verify(name):
                    pass
            return []
        except DamagedError as error:
            told.append(f"{path.name}: {error}")
    return told


def _some(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
