"""What is saved beside the training is what was there then, before anything else reads or fills its memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.checkpoint import folder, writing
from tests.checkpoint.test_values import parallel


def test_memory_that_runs_out_while_writing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("paceline.checkpoint.writing.write_rank_file", fail)
    saving = pl.save(tmp_path / "x", parallel(), step=1, background=True)
    with pytest.raises(pl.UserError, match="x was not saved: MemoryError"):
        saving.wait()


def gone_back(path: Path) -> int:
    model = parallel()
    pl.save(path / "step-00000001", model, step=1)
    if pl.init().rank == 0:
        # Takes its time, as a large one does.
        writing.complete, real = _later, writing.complete
    try:
        pl.save(path / "step-00000002", model, step=2, background=True)
        return pl.load(path, model).step
    finally:
        if pl.init().rank == 0:
            writing.complete = real


def _later(path: Path, manifest: Any) -> None:
    time.sleep(0.3)
    folder.complete(path, manifest)


def test_load_waits_for_what_is_being_saved(ranks, tmp_path: Path) -> None:
    assert ranks(2, gone_back, tmp_path) == [2, 2]


def saved_again_and_again(path: Path) -> list[bool]:
    """Saves in the background between steps; whether each checkpoint holds what was there then."""
    model = pl.parallelize(torch.nn.Linear(64, 64), pl.Strategy(zero=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = []
    for step in range(1, 4):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append({name: value.clone() for name, value in pl.full_state_dict(model).items()})
        pl.save(path / f"step-{step:08}", model, optimizer, step=step, background=True)
    same = []
    for step, values in enumerate(expected, 1):
        pl.load(path / f"step-{step:08}", model, optimizer)
        found = pl.full_state_dict(model)
        same.append(all(torch.equal(found[name], values[name]) for name in values))
    return same


def test_memory_that_the_next_save_takes_over_is_written_before(ranks, tmp_path: Path) -> None:
    assert ranks(2, saved_again_and_again, tmp_path) == [[True] * 3] * 2
