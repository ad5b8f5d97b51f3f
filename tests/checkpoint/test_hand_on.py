"""Files that ranks of one host have written, on another host."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import paceline as pl
from paceline.checkpoint import hand_on as module
from paceline.checkpoint.hand_on import hand_on
from tests.ranks import RankPool

SIZES = [("empty", 0), ("short", 5), ("long", 3001)]


def handed_on(folder: Path, lacks: str = "", blocked: bool = False) -> tuple[str, dict[str, int]]:
    """Two hosts of one rank each, which write a file of each size; what a rank is told and has then."""
    world = replace(pl.init(), local_rank=0)
    own = folder / f"host-{world.rank}"
    own.mkdir(parents=True)
    for name, size in SIZES:
        (own / f"{name}-{world.rank}").write_bytes(bytes([world.rank + 1]) * size)
    if lacks and world.rank == 0:
        (own / lacks).unlink()
    if blocked and world.rank == 1:
        (own / "long-0").mkdir()
    files = [(rank, f"{name}-{rank}", size) for rank in range(2) for name, size in SIZES]
    with patch.object(module, "_PIECE", 1000):
        problem = hand_on(own, files, world)
    return problem, {path.name: path.stat().st_size for path in own.iterdir() if path.is_file()}


def test_each_host_has_all_files(ranks: RankPool, tmp_path: Path) -> None:
    expected = {f"{name}-{rank}": size for rank in range(2) for name, size in SIZES}
    assert ranks(2, handed_on, tmp_path) == [("", expected)] * 2
    for host in range(2):
        for rank in range(2):
            assert (tmp_path / f"host-{host}" / f"long-{rank}").read_bytes() == bytes([rank + 1]) * 3001
    assert sum(len(files) for _, _, files in os.walk(tmp_path)) == 12


def test_what_cannot_be_read_is_told_and_holds_nobody_up(ranks: RankPool, tmp_path: Path) -> None:
    (told, _), (other, found) = ranks(2, handed_on, tmp_path, "long-0")
    assert "long-0" in told and not other
    assert found["short-0"] == 5 and found["long-1"] == 3001


def test_what_is_there_already_is_left_as_it_is(ranks: RankPool, tmp_path: Path) -> None:
    (_, (told, found)) = ranks(2, handed_on, tmp_path, "", True)
    assert not told and "long-0" not in found
