"""Files of `torch.save` and folders of PyTorch DCP: what is in them comes in, their code does not run."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checkpoint.exchange.torch_files import read_torch
from paceline.checkpoint.load import Loaded
from paceline.core.errors import UserError
from tests.train.processes import called


class Tied(nn.Module):
    """With a tied parameter, a buffer, and names that wrappers may go before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def taken(folder: Path, *arguments: str) -> tuple[int, str, str]:
    return called(folder, "checkpoint", "import", *arguments, "--out", "new")


def loads(folder: Path, expected: nn.Module) -> Loaded:
    """Loads the new checkpoint into a model of other weights, and compares."""
    model = pl.parallelize(Tied())
    loaded = pl.load(folder / "new", model)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    pl.release(model)
    return loaded


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("wrapper", ["", "module.", "module._orig_mod."])
def test_a_state_dict_comes_in(tmp_path: Path, wrapper: str, zipped: bool) -> None:
    model = Tied()
    state = {wrapper + name: value for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    assert taken(tmp_path, "w.pt") == (0, "new: 7 parameters and buffers\n", "")
    assert loads(tmp_path, model).step == 0


def test_what_is_beside_it_comes_too(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 12, "best": torch.eye(2)}
    torch.save(state, tmp_path / "w.pt")
    status, out, _ = taken(tmp_path, "w.pt")
    assert status == 0 and "without the optimizer's states: --optimizer CLASS" in out
    loaded = loads(tmp_path, model)
    assert loaded.step == 12 and loaded.extra["best"].equal(torch.eye(2))


def test_code_runs_only_where_it_is_needed_and_trusted(tmp_path: Path) -> None:
    model, made = Tied(), tmp_path / "made"
    torch.save({"model": model.state_dict(), "evil": Evil(made)}, tmp_path / "w.pt")
    status, _, err = taken(tmp_path, "w.pt")
    assert status == 2 and "without running code: it holds posix.mkdir" in err and "give --trust" in err
    assert not made.exists() and not (tmp_path / "new").exists()
    status, _, _ = taken(tmp_path, "w.pt", "--trust")
    assert status == 0 and made.exists()
    loads(tmp_path, model)


def test_what_needs_code_to_be_read_again_is_left_out_and_told(tmp_path: Path) -> None:
    model = Tied()
    torch.save({"model": model.state_dict(), "args": argparse.Namespace(lr=1)}, tmp_path / "w.pt")
    assert "argparse.Namespace" in taken(tmp_path, "w.pt")[2]
    status, out, _ = taken(tmp_path, "w.pt", "--trust")
    assert status == 0 and "without args, which would need code" in out
    assert loads(tmp_path, model).extra == {}


def test_a_tied_weight_that_differs_is_another_models(tmp_path: Path) -> None:
    state = Tied().state_dict()
    state["head.weight"] = state["head.weight"] + 1
    torch.save(state, tmp_path / "w.pt")
    assert taken(tmp_path, "w.pt")[0] == 0
    with pytest.raises(pl.UserError, match="only it has head"):
        loads(tmp_path, Tied())


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_needs_trust_and_brings_everything(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model.head(model.norm(model.embedding(torch.arange(7)))).square().sum().backward()
    optimizer.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**states, "step": 4}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    status, _, err = taken(tmp_path, "dcp")
    assert status == 2 and "is a folder of PyTorch DCP" in err and "give --trust" in err
    assert taken(tmp_path, "dcp", "--trust", "--optimizer", "AdamW")[0] == 0
    assert loads(tmp_path, model).step == 4
    parallel = pl.parallelize(Tied())
    mine = torch.optim.AdamW(parallel.parameters())
    pl.load(tmp_path / "new", parallel, mine)
    assert mine.param_groups[0]["lr"] == 0.25
    for one, other in zip(model.parameters(), parallel.parameters(), strict=True):
        for key, value in optimizer.state[one].items():
            assert torch.equal(mine.state[other][key], value), key
    pl.release(parallel)


def test_dcp_without_its_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"no pickle")
    status, _, err = taken(tmp_path, "dcp", "--trust")
    assert status == 2 and "is damaged, or torch did not write it" in err and err.count("\n") == 1


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "holds a list"),
        ({}, "holds no model's state_dict"),
        ({"epoch": 3, "model": {"w": 1}}, "it has epoch, model"),
        ({"student": {"w": torch.ones(1)}, "teacher": {"w": torch.ones(1)}}, "holds student, teacher"),
        ({"w": torch.zeros(1).expand(10**12)}, "says to have 1,000,000,000,000 elements and has 4 bytes"),
        ({"w": torch.eye(2).to_sparse()}, "w is a tensor of torch.sparse_coo"),
        ({"w": torch.zeros(2, dtype=torch.complex128)}, "w is torch.complex128"),
        ({"w": torch.zeros(2, device="meta")}, "expected a dense one with values"),
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_torch(saved(tmp_path / "w.pt", value), trust=False)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("damage", ["cut", "hole", "junk", "empty"])
def test_damaged_files_are_one_line(tmp_path: Path, damage: str, trust: bool) -> None:
    path = saved(tmp_path / "w.pt", Tied().state_dict())
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(
        {
            "cut": data[:middle],
            "hole": data[:60] + bytes(200) + data[260:],
            "junk": b"What is this?",
            "empty": b"",
        }[damage]
    )
    with pytest.raises(UserError, match="is damaged, or torch did not write it"):
        read_torch(path, trust)


def test_what_is_not_there_or_of_no_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in (("nowhere", "nowhere is not there"), ("empty", "neither Hugging Face's config.json nor")):
        status, _, err = taken(tmp_path, path)
        assert status == 2 and words in err and err.count("\n") == 1
    assert called(tmp_path, "checkpoint", "import", "empty")[2].startswith("paceline: error: --out: name")
