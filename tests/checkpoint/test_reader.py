"""Ranges of tensors, read into memory of any kind, equal what was written, whatever blocks they cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint import reader as module
from paceline.checkpoint.manifest import DamagedError, Part, Stored
from paceline.checkpoint.rank_file import checksums, file_name, write_rank_file
from paceline.checkpoint.reader import Reader

BLOCK = 64
"""Bytes, in these tests."""


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    with (
        patch("paceline.checkpoint.rank_file.BLOCK_BYTES", BLOCK),
        patch.object(module, "BLOCK_BYTES", BLOCK),
        patch.object(module, "READ_BYTES", 4 * BLOCK),
        patch.object(module, "_MOST_FILES", 2),
    ):
        yield


def written(folder: Path, whole: Tensor, cuts: list[int]) -> Reader:
    """A tensor in as many files as it is cut into."""
    parts = []
    for rank, (start, stop) in enumerate(zip([0, *cuts], [*cuts, whole.numel()], strict=True)):
        if start < stop:
            (folder / file_name(rank)).unlink(missing_ok=True)
            write_rank_file(folder / file_name(rank), {"x": whole[start:stop].clone()})
            parts.append(Part(file_name(rank), start, stop, checksums(whole[start:stop])))
    dtype = str(whole.dtype).removeprefix("torch.")
    return Reader(folder, {"x": Stored(dtype, tuple(whole.shape), tuple(parts))})


@given(
    numel=st.integers(1, 700),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.uint8]),
    into=st.sampled_from([None, torch.float32, torch.float64]),
    strided=st.booleans(),
    data=st.data(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_range_is_what_was_written(
    tmp_path: Path, numel: int, dtype: torch.dtype, into: torch.dtype | None, strided: bool, data: st.DataObject
) -> None:
    whole = torch.arange(numel).remainder(251).to(dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=3)))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    reader = written(tmp_path, whole, cuts)
    target = torch.full((2 * (stop - start),), 99, dtype=into or dtype)[:: 2 if strided else 1][: stop - start]
    reader.read_into("x", start, target)
    assert torch.equal(target, whole[start:stop].to(target.dtype))
    assert torch.equal(reader.read("x", start, stop), whole[start:stop])
    assert sum(reader.verify("x")) == whole.nbytes


def test_what_is_wanted_in_place_needs_a_block_at_each_end_at_most(tmp_path: Path) -> None:
    reader = written(tmp_path, torch.arange(1000, dtype=torch.float32), [])
    target, sizes, empty = torch.empty(801), [], torch.empty

    def counted(size: int, **rest: torch.dtype) -> Tensor:
        sizes.append(size)
        return empty(size, **rest)

    with patch("torch.empty", counted):
        reader.read_into("x", 99, target)
    assert torch.equal(target, torch.arange(99.0, 900.0))
    assert sizes == [BLOCK // 4, BLOCK // 4]


def test_a_pipe_in_a_file_s_place_is_not_waited_for(tmp_path: Path) -> None:
    reader = written(tmp_path, torch.arange(10.0), [])
    (tmp_path / file_name(0)).unlink()
    os.mkfifo(tmp_path / file_name(0))
    with pytest.raises(DamagedError, match=r"rank-00000\.safetensors cannot be read: it is no file"):
        reader.read("x")
