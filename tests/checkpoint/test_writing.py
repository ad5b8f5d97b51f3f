"""Two jobs that save the same step: one was taken for lost, and goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.folder import is_complete, make_folder, read_manifest
from paceline.checkpoint.writing import OwnPart, commit, write_part
from paceline.core.errors import UserError


def part(rank: int, token: str) -> OwnPart:
    found = OwnPart(rank, token=token)
    found.add("model/weight", 4 * rank, torch.full((4,), float(rank)), (8,))
    found.values = {"optimizers": [], **({"common": {}} if rank == 0 else {})}
    return found


def commit_both(folder: Path, token: str) -> None:
    commit(folder, 3, 2, {}, 0.0, token=token)


@pytest.mark.parametrize("further", [0, 1, 2])
def test_a_job_completes_nothing_that_another_one_has_begun_anew(tmp_path: Path, further: int) -> None:
    folder = tmp_path / "step-00000003"
    make_folder(folder)
    for rank in range(2):
        write_part(folder, part(rank, "frozen"))
    # The next job finds it unfinished, and is so far when the one before wakes up.
    make_folder(folder)
    for rank in range(further):
        write_part(folder, part(rank, "next"))
    with pytest.raises(UserError):
        commit_both(folder, "frozen")
    assert not is_complete(folder)
    for rank in range(further, 2):
        write_part(folder, part(rank, "next"))
    commit_both(folder, "next")
    assert read_manifest(folder).step == 3


def test_a_part_of_the_other_job_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    make_folder(tmp_path / "step-00000003")
    write_part(tmp_path / "step-00000003", part(0, "next"))
    write_part(tmp_path / "step-00000003", part(1, "frozen"))
    with pytest.raises(UserError, match="another job saves to"):
        commit_both(tmp_path / "step-00000003", "next")
    shutil.rmtree(tmp_path / "step-00000003")
