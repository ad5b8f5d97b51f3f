"""The samples that are written down for a step are those that its ranks were given."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data import TokenFile
from paceline.data.loader import Loader
from paceline.data.samples import LeftOut, gather
from paceline.train.skipped import record

CONTEXT = 8


@pytest.mark.parametrize("left_out", [(), ((0, 2), (3, 1))])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_written_down_is_what_each_rank_was_given(world_size: int, left_out: LeftOut) -> None:
    tokens = np.arange(100, dtype=np.uint16)
    for rank in range(world_size):
        with Loader(
            TokenFile(Path("memory"), 100, tokens),
            context=CONTEXT,
            batch_size=8,
            micro_batch=2,
            rank=rank,
            world_size=world_size,
            seed=3,
            left_out=left_out,
        ) as loader:
            # Beyond an epoch of 13 samples, too.
            for step, given in enumerate(islice(loader, 5), 1):
                found = record(step, 2.5, 1.5, loader.shares(step - 1))
                assert (found["step"], found["loss"], found["norm"]) == (step, 2.5, 1.5)
                assert len(found["samples"]) == world_size
                for indices, batch in zip(found["samples"][rank], given, strict=True):
                    expected = gather(tokens, np.array(indices, np.int64), CONTEXT)[0]
                    # A rank whose part is smaller is given a stand-in for an empty micro-batch.
                    assert torch.equal(batch.inputs, torch.from_numpy(expected)) or (not indices and not batch.tokens)


@pytest.mark.parametrize(("norm", "written"), [(2.0, 2.0), (float("nan"), None), (float("inf"), None)])
def test_what_is_no_number_is_written_as_null(norm: float, written: float | None) -> None:
    assert [record(1, norm, norm, [])[key] for key in ("loss", "norm")] == [written] * 2
