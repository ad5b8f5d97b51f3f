"""The samples that are written down: none is lost or repeated, whoever goes on."""

from __future__ import annotations

import json
import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from paceline.data.loader import Loader
from paceline.train.samples import write_samples
from tests.ranks import RankError, RankPool
from tests.train.processes import paceline, program, trained
from tests.train.test_not_finite import forward_gives
from tests.train.test_resume import curve

FLAGS = ("--log.every", "1", "--log.samples", "--log.validate-every", "0", "--log.validate-batches", "1")


def taken(run: Path) -> dict[int, list[int]]:
    """The samples of each step, of all ranks; of a step that was repeated, the last."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return {line["step"]: [number for rank in line["samples"] for number in rank] for line in lines}


def fails() -> AbstractContextManager[None]:
    def change(loss: torch.Tensor, call: int) -> torch.Tensor:
        if call > 24:
            raise RuntimeError("it fails")
        return loss

    return forward_gives(change)


@pytest.mark.full
@pytest.mark.parametrize("end", ["by an exception", "by a signal"])
def test_over_an_end_and_other_ranks_each_epoch_has_each_sample_once(
    ranks: RankPool, nano: list[str], tmp_path: Path, end: str
) -> None:
    flags = [*nano, *FLAGS, "--batch", "12", "--checkpoint.every", "5", "--folder", "run", "--steps", "100000"]
    run = tmp_path / "run"
    if end == "by an exception":
        with pytest.raises(RankError, match="it fails"):
            trained(ranks, 2, tmp_path, flags, fails)
    else:
        with program(paceline("train", *flags, "--workers", "2"), tmp_path) as started:
            while len(list(run.glob("checkpoints/*/manifest.json"))) < 2:
                assert started.process.poll() is None, started.process.communicate()
            os.kill(started.rank(1), signal.SIGKILL)
            started.finish()
    last = max(curve(run)) + 25
    status, out, err = trained(ranks, 3, tmp_path, ["--resume", "run", "--steps", str(last), "--workers", "3"])
    assert (status, err) == (0, "") and "going on after step" in out
    steps = taken(run)
    assert sorted(steps) == list(range(1, last + 1)) == sorted(curve(run))
    numbers = [number for step in range(1, last + 1) for number in steps[step]]
    count = 1 + max(numbers)
    assert len(numbers) == 12 * last > count
    for start in range(0, len(numbers), count):
        epoch = numbers[start : start + count]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) == set(range(count)) or start + count > len(numbers)


def test_a_rank_that_was_given_others_says_so() -> None:
    class Given(Loader):
        def __init__(self) -> None:
            self.given = [[1, 2]]

        def shares(self, step: int) -> list[list[list[int]]]:
            return [[[1, 2]], [[3, 4]]]

    class Rank:
        folder = None

        def __init__(self, rank: int) -> None:
            self.world = self
            self.rank = rank

    write_samples(Rank(0), Given(), 5)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"rank 1 was given samples .* in step 5"):
        write_samples(Rank(1), Given(), 5)  # type: ignore[arg-type]
