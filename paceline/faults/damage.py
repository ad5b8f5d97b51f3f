"""Checkpoints that are damaged after they were written: the one before is taken, and the file is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from paceline.faults.outcome import jobs
from paceline.faults.processes import kill_all
from paceline.faults.training import FaultError, Training

RANK, MANIFEST = "rank-00001.safetensors", "manifest.json"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-50] ^= 4
    path.write_bytes(data)


def _zero(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9000:-1000] = bytes(8000)
    path.write_bytes(data)


def _damaged(name: str, damage: Callable[[Path], None]) -> Callable[[Training], str]:
    def act(training: Training) -> str:
        killed = kill_all(training, checkpoints=2)
        newest, before = training.checkpoints()[:2]
        path = newest / name
        content = path.read_bytes()
        damage(path)
        if path.exists() and path.read_bytes() == content:
            raise FaultError(f"{path} is as it was")
        training.go_on()
        (went_on, *_) = jobs(training.run)
        if before.name != f"step-{went_on.after:08}":
            raise FaultError(f"{newest.name} is damaged and {before.name} whole, yet it went on after {went_on.after}")
        training.must_say(newest.name)
        return f"{killed}; {newest.name}/{name} was damaged, and it went on from {before.name}"

    return act


flip = _damaged(RANK, _flip)
zero = _damaged(RANK, _zero)
truncate = _damaged(RANK, lambda path: os.truncate(path, 700))
remove = _damaged(RANK, Path.unlink)
half_manifest = _damaged(MANIFEST, lambda path: os.truncate(path, 1500))
