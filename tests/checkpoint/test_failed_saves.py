"""Whatever ends a save on the way leaves older checkpoints as they are, and is told."""

from __future__ import annotations

import os
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from tests.checkpoint.two_saved import loaded, parallel, step
from tests.engine.models import assert_same, snapshot
from tests.quick import full
from tests.ranks import FORKS


def saved_without_room(folder: Path, room: int, background: bool) -> tuple[str, list[str], dict[str, Any]]:
    """A step, a save on rank 1 of which no file may be longer than `room`, and another step."""
    model, optimizer = parallel()
    step(model, optimizer)
    pl.save(folder / "step-00000001", model, optimizer, step=1)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if pl.init().rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))
            saving = pl.save(folder / "step-00000002", model, optimizer, step=2, background=background)
            step(model, optimizer)
            if background:
                while not saving.done:
                    pass
        except pl.UserError as error:
            message = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        pl.save(folder / "step-00000003", model, optimizer, step=3)
    return message, [str(warning.message) for warning in caught], snapshot(model)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("room", [100, full(5000)])
def test_a_disk_that_fills_costs_one_checkpoint(ranks, tmp_path: Path, room: int, background: bool) -> None:
    for message, told, _ in ranks(2, saved_without_room, tmp_path, room, background):
        (words,) = told if background else [message]
        assert "step-00000002 was not saved" in words and "File too large" in words
    assert not (tmp_path / "step-00000002").exists(), "it takes no room"
    assert [number for number, *_ in ranks(2, loaded, tmp_path)] == [3, 3]
    shutil.rmtree(tmp_path / "step-00000003")
    assert [number for number, *_ in ranks(2, loaded, tmp_path)] == [1, 1]


def dies_at(folder: Path, calls: int) -> None:
    """Saves; the process ends at its `calls`-th call that changes the disk."""
    torch.set_num_threads(1)
    model, optimizer = parallel()
    step(model, optimizer)
    left = [calls]

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "mkdir", "open", "unlink"):
        setattr(os, name, counted(name))
    pl.save(folder / "step-00000002", model, optimizer, step=2)
    os._exit(0)


def test_a_process_that_ends_anywhere_while_saving_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    model, optimizer = parallel()
    step(model, optimizer)
    expected = snapshot(model)
    pl.save(tmp_path / "step-00000001", model, optimizer, step=1)
    pl.release(model)
    ended, calls = 9, 0
    while ended == 9:
        process = FORKS.Process(target=dies_at, args=(tmp_path, calls))
        process.start()
        process.join(60)
        ended, calls = process.exitcode, calls + 1
        assert ended in (0, 9)
        number, state, _ = loaded(tmp_path)
        assert number in (1, 2) and (number == 2) == (tmp_path / "step-00000002" / "manifest.json").exists()
        if number == 1:
            assert_same(state, expected, atol=0)
        elif ended == 9:
            # It counts from the rename on; a further save would be of another step.
            shutil.rmtree(tmp_path / "step-00000002")
    assert calls > 8


def test_what_a_killed_process_had_half_written_is_in_nobodys_way(tmp_path: Path) -> None:
    model, optimizer = parallel()
    (tmp_path / "step-00000001").mkdir()
    # As safetensors calls what it writes, until it has its name.
    for name in ("rank-00000.safetensors", "rank-00001.json.new", ".tmpmfIzfY"):
        (tmp_path / "step-00000001" / name).write_bytes(b"half")
    pl.save(tmp_path / "step-00000001", model, optimizer, step=1)
    assert loaded(tmp_path)[0] == 1 and not (tmp_path / "step-00000001" / ".tmpmfIzfY").exists()
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "notes.txt").write_text("mine")
    with pytest.raises(pl.UserError, match="holds something else"):
        pl.save(tmp_path / "step-00000002", model, optimizer, step=2)
    pl.release(model)
