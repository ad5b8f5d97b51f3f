"""What is wrong with a run that was disturbed, beside one that was not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from paceline.checkpoint.folder import checkpoints_in, read_manifest
from paceline.checkpoint.rank_file import DamagedError, Reader

Curve = Mapping[int, tuple[float, ...]]
"""Figures of each step."""


def curve(run: Path) -> dict[int, tuple[float, ...]]:
    """Loss and gradient norm by step of a run's metrics.jsonl; of a repeated step, the last."""
    path = run / "metrics.jsonl"
    found: dict[int, tuple[float, ...]] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            # The last line of a process that was killed, or of one that is writing.
            continue
        if "train/loss" in line:
            found[int(line["step"])] = (line["train/loss"], line["train/grad_norm"])
    return found


def wrong_with_curve(found: Curve, expected: Curve) -> list[str]:
    """Steps that are missing, that nobody asked for, or whose figures are not the same to the bit.

    A step's samples follow from the seed and the step alone, so that a lost or repeated sample shows here.
    """
    wrong = []
    if missing := sorted(expected.keys() - found.keys()):
        wrong.append(f"steps {missing} are missing")
    if more := sorted(found.keys() - expected.keys()):
        wrong.append(f"steps {more} are not of this run")
    other = [step for step in sorted(expected.keys() & found.keys()) if found[step] != expected[step]]
    if other:
        wrong.append(f"step {other[0]}: {found[other[0]]}, undisturbed {expected[other[0]]}; {len(other)} steps differ")
    return wrong


def wrong_with_checkpoints(run: Path) -> list[str]:
    """Nothing if the latest checkpoint or the one before is whole, every byte of it read."""
    folder = run / "checkpoints"
    newest = sorted(checkpoints_in(folder), reverse=True)[:2] if folder.is_dir() else []
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
    return told or ["there is no checkpoint"]


def wrong_with_end(alive: Mapping[int, str]) -> list[str]:
    """Processes that outlived their job, by number with their command."""
    return [f"process {number} was left: {command}" for number, command in alive.items()]
