"""A checkpoint's folder is what was named when the call was made, the same for all ranks, or is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checkpoint import folder


def parallel() -> nn.Module:
    return pl.parallelize(nn.Linear(2, 2))


def test_a_relative_folder_stays_where_the_program_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    saving = pl.save("checkpoints/step-1", parallel(), step=1, background=True)
    # The thread that writes may not have begun, or be anywhere.
    os.chdir("elsewhere")
    saving.wait()
    assert saving.path == tmp_path / "checkpoints/step-1"
    assert sorted(file.name for file in saving.path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("file", "file is there and holds something else"),
        ("file/in", "cannot be made: Not a dir"),
        ("a\0b", "null byte"),
    ],
)
def test_what_cannot_be_a_folder_is_refused(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(pl.UserError, match=f"{expected}.*: name a|{expected}.*; name another"):
        pl.save(tmp_path / name, parallel(), step=1)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_text("")
    with pytest.raises(pl.UserError, match=r"weights\.pt is a file: name a checkpoint that pl\.save wrote"):
        pl.load(tmp_path / "weights.pt", parallel())


def on_disks_of_their_own(path: Path) -> tuple[str, list[str]]:
    """As hosts without a common one: what has the same name is another folder on each, which a loop may have made."""
    world, model, before = pl.init(), parallel(), os.getcwd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = path / str(world.rank)
    (own / "step-1").mkdir(parents=True)
    folder._SEEN_SECONDS = 0.2
    os.chdir(own)
    try:
        with pytest.raises(pl.UserError) as caught:
            pl.save("step-1", model, optimizer, step=1, background=True)
    finally:
        os.chdir(before)
        folder._SEEN_SECONDS = 5.0
    # Nobody waits for a part that never comes.
    saved = pl.save(path / "shared", model, optimizer, step=1)
    return str(caught.value), sorted(file.name for file in saved.path.iterdir())


def test_a_folder_that_ranks_do_not_share_is_refused_at_once(ranks, tmp_path: Path) -> None:
    for message, files in ranks(2, on_disks_of_their_own, tmp_path):
        assert f"rank 1: {tmp_path}/1/step-1 is not the folder that rank 0 has made" in message
        assert files == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert (tmp_path / "1/step-1").is_dir(), "another rank's folder is not ours to remove"
