from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoint.exchange.tensor_file import DTYPES, Lazy, write_tensors


def lazy(name: str, tensor: Tensor) -> Lazy:
    return Lazy(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def test_safetensors_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    shapes = [(), (0,), (3,), (5, 7), (2, 1, 3)]
    expected = {f"{dtype} {shape} é": (torch.rand(shape) * 9).to(dtype) for dtype in DTYPES for shape in shapes}
    write_tensors(tmp_path / "w", [lazy(name, tensor) for name, tensor in expected.items()])
    found = load_file(tmp_path / "w")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8)), name


def test_columns_become_rows(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    write_tensors(tmp_path / "w", [lazy("w", tensor.t())])
    assert load_file(tmp_path / "w")["w"].equal(tensor.t())


def test_no_more_than_one_tensor_is_there_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[Tensor]] = []

    def make(value: int) -> Tensor:
        assert not any(reference() is not None for reference in made[:-1])
        tensor = torch.full((100,), float(value))
        made.append(weakref.ref(tensor))
        return tensor

    write_tensors(tmp_path / "w", [Lazy(f"{n}", torch.float32, (100,), partial(make, n)) for n in range(5)])
    assert len(made) == 5 and load_file(tmp_path / "w")["3"].eq(3).all()


def test_what_was_announced_otherwise_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"w is torch.float32 \[3\]"):
        write_tensors(tmp_path / "w", [Lazy("w", torch.float32, (4,), lambda: torch.ones(3))])
