"""A program that ends while a save goes on beside it does not lose that save, nor hide that it failed."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from pathlib import Path

import pytest

import paceline as pl
from paceline.checkpoint.folder import is_complete, read_manifest
from tests.quick import full
from tests.train import processes

PROGRAM = """
import time
import torch
import paceline as pl
from paceline.checkpoint import writing

world = pl.init(device="cpu")
model = pl.parallelize(torch.nn.Linear(4, 4), pl.Strategy(zero=world.world_size - 1))
write = writing.write_rank_file

def changed(path, tensors):
%s
    write(path, tensors)

writing.write_rank_file = changed
pl.save("at 1", model, step=1, background=True)
%s
"""


def program(folder: Path, ranks: int, write: str, end: str) -> tuple[int, str]:
    """The highest exit status of so many ranks, and what they write to stderr."""
    script = folder / "program.py"
    script.write_text(PROGRAM % (textwrap.indent(write, "    "), end))
    job = {"PYTHONPATH": str(Path(pl.__file__).parents[1]), "PACELINE_RENDEZVOUS": f"file://{folder}/store"}
    job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                processes.program(
                    [sys.executable, str(script)], folder, {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                )
            )
            for rank in range(ranks)
        ]
        ended = [rank.finish() for rank in started]
    return max(status for status, _, _ in ended), "".join(err for _, _, err in ended)


@pytest.mark.parametrize("ranks", [1, full(2)])
def test_a_save_that_ranks_end_beside_is_written(tmp_path: Path, ranks: int) -> None:
    # Of several, one ends long before the others.
    status, err = program(tmp_path, ranks, "time.sleep(1.5 * (world.rank or world.world_size == 1))", "")
    assert status == 0, err
    assert read_manifest(tmp_path / "at 1").step == 1


@pytest.mark.full
def test_that_it_failed_is_said_in_the_end(tmp_path: Path) -> None:
    status, err = program(tmp_path, 1, "raise OSError('no room')", "")
    assert (status, err) == (0, f"paceline: {tmp_path / 'at 1'} was not saved: OSError: no room\n")


@pytest.mark.full
def test_a_rank_that_fails_keeps_the_others_no_longer(tmp_path: Path) -> None:
    # The other's part never comes.
    write = "if world.rank: __import__('os')._exit(0)"
    status, err = program(tmp_path, 2, write, "time.sleep(1)\n1 / world.rank")
    assert status != 0 and "ZeroDivisionError" in err
    assert not is_complete(tmp_path / "at 1")
