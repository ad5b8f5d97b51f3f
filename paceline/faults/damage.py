"""Checkpoints that are damaged after they were written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint.folder import checkpoints_in
from paceline.faults.processes import kill_all_workers
from paceline.faults.training import FaultError, Training

RANK, MANIFEST = "rank-00001.safetensors", "manifest.json"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-50] ^= 4
    path.write_bytes(data)


def _zero(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-900:-100] = bytes(800)
    path.write_bytes(data)


def _damaged(name: str, damage: Callable[[Path], None]) -> Callable[[Training], None]:
    def act(training: Training) -> None:
        kill_all_workers(training)
        newest = max(checkpoints_in(training.run / "checkpoints"))
        damage(newest / name)
        training.go_on()
        if name != MANIFEST and f"{newest.name}" not in training.said():
            raise FaultError(f"{newest.name} is damaged and nothing was said of it")

    return act


flip = _damaged(RANK, _flip)
zero = _damaged(RANK, _zero)
truncate = _damaged(RANK, lambda path: os.truncate(path, 700))
remove = _damaged(RANK, Path.unlink)
half_manifest = _damaged(MANIFEST, lambda path: os.truncate(path, 1500))
