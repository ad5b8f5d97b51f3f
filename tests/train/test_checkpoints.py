"""When a run saves, and how long ranks wait for each other then."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.checkpoint.manifest import NAME
from paceline.comm.patience import SHORTEST_SECONDS, StepPatience, limit
from paceline.models import PRESETS
from paceline.models.transformer import Transformer
from paceline.train import checkpoints
from paceline.train.checkpoints import Checkpoints
from paceline.train.run_folder import METRICS
from paceline.train.sections import CheckpointConfig
from tests.train.processes import called, metrics


class Update:
    """Holds no optimizer."""

    optimizer = ()

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_ranks_wait_for_a_slow_disk_longer_than_for_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(checkpoints, "save_beside", lambda *_, **__: limits.append(limit(600)))
    saves = Checkpoints(
        tmp_path, CheckpointConfig(every=3), Transformer(PRESETS["nano"]), Update(), pl.init(), {}, 0, ()
    )
    patience = StepPatience()
    try:
        for step in range(1, 4):
            patience.step()
            saves.save_if_due(step, False, print, patience.pause)
            assert limit(600) == (600 if step in (1, 3) else SHORTEST_SECONDS)
    finally:
        patience.pause()
    assert limits == [600]


def test_lines_up_to_a_checkpoints_step_are_on_the_disk_before_it_counts(
    nano: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    counts: dict[str, int] = {}
    fsync, replace = os.fsync, os.replace

    def syncing(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name == METRICS:
            synced.append(max(json.loads(line)["step"] for line in path.read_text().splitlines()))
        fsync(descriptor)

    def replacing(source: Path, target: Path) -> None:
        if Path(target).name == NAME:
            counts[Path(target).parent.name] = synced[-1]
        replace(source, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    flags = ["--steps", "7", "--log.every", "1", "--log.validate-every", "0", "--checkpoint.every", "3"]
    assert called(tmp_path, "train", *nano, *flags)[0] == 0
    for step in (3, 6, 7):
        assert counts[f"step-{step:08d}"] >= step


def test_what_checkpoints_take_is_among_the_figures(nano: list[str], tmp_path: Path) -> None:
    flags = ["--steps", "7", "--log.every", "1", "--log.validate-every", "0", "--checkpoint.every", "3"]
    assert called(tmp_path, "train", *nano, *flags, "--folder", "run")[0] == 0
    told: dict[float, dict[str, float]] = {}
    for line in metrics(tmp_path / "run"):
        if "checkpoint/step" in line:
            told.setdefault(line["checkpoint/step"], {}).update(line)
    assert list(told) == [3, 6, 7]
    for step, figures in told.items():
        folder = tmp_path / "run" / "checkpoints" / f"step-{int(step):08d}"
        assert 0 < figures["checkpoint/stall_seconds"] <= figures["checkpoint/seconds"] < 60
        if folder.exists():
            assert figures["checkpoint/bytes"] == sum(file.stat().st_size for file in folder.iterdir())
