"""When a run saves, and how long ranks wait for each other then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.comm.patience import SHORTEST_SECONDS, StepPatience, limit
from paceline.models import PRESETS
from paceline.models.transformer import Transformer
from paceline.train import checkpoints
from paceline.train.checkpoints import Checkpoints
from paceline.train.config import CheckpointConfig


class Update:
    """Holds no optimizer."""

    optimizer = ()

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_ranks_wait_for_a_slow_disk_longer_than_for_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(checkpoints.pl, "save", lambda *_, **__: limits.append(limit(600)))
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
