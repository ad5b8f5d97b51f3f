"""`paceline checkpoint` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline as pl
from tests.train.processes import called


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Like a run's folder, with checkpoints of steps 1 to 4 and one that was not finished."""
    model = pl.parallelize(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        pl.save(tmp_path / "run" / "checkpoints" / f"step-{step:08d}", model, optimizer, step=step)
    (tmp_path / "run" / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    torch.save(model.state_dict(), tmp_path / "expected.pt")
    pl.release(model)
    return tmp_path / "run"


def steps(run: Path) -> list[str]:
    return sorted(path.name[-1] for path in (run / "checkpoints").iterdir())


def test_show_tells_what_each_holds_the_latest_first(run: Path) -> None:
    status, out, err = called(run, "checkpoint", "show", str(run), "--json", "found.json")
    assert (status, err) == (0, "")
    assert [line.split("step ")[1].split(",")[0] for line in out.splitlines() if line[:1] == "/"] == ["4", "2", "1"]
    assert "15 elements in 2 parameters and buffers; SGD" in out and "saved by 1 rank at zero 0 in float32" in out
    found = json.loads((run / "found.json").read_text())["checkpoints"]
    assert [one["step"] for one in found] == [4, 2, 1] and found[0]["elements"] == 15


def test_verify_reads_everything_and_names_what_is_damaged(run: Path) -> None:
    assert called(run, "checkpoint", "verify", str(run))[0] == 0
    path = run / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    status, out, _ = called(run, "checkpoint", "verify", str(run))
    assert status == 1 and out.count(": right, ") == 2
    assert f"DAMAGED: {path} cannot be read: the checksum of" in out


def test_export_gives_the_weights_under_the_models_names(run: Path) -> None:
    status, _, err = called(run, "checkpoint", "export", ".", "--out", "weights.safetensors")
    assert (status, err) == (0, "")
    expected, found = torch.load(run.parent / "expected.pt"), load_file(run / "weights.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    status, _, err = called(run, "checkpoint", "export", ".", "--out", "weights.safetensors")
    assert status == 2 and "is there already" in err


def test_prune_keeps_the_latest_and_every_nth(run: Path) -> None:
    assert steps(run) == ["1", "2", "3", "4"]
    status, out, _ = called(run, "checkpoint", "prune", ".", "--keep", "1", "--keep-every", "1")
    assert status == 0 and "3 left" in out and steps(run) == ["1", "2", "4"]
    status, out, _ = called(run, "checkpoint", "prune", "checkpoints", "--keep", "1")
    assert status == 0 and steps(run) == ["4"]


def test_mistakes_are_one_line(run: Path) -> None:
    for arguments, words in (
        (("show", "nowhere"), "nowhere is not there"),
        (("prune", ".", "--keep", "0"), "--keep: expected 1 or more"),
        (("burn", "."), "expected one of show, verify, export, import, prune"),
        (("show", str(run / "checkpoints" / "step-00000003")), "holds no complete checkpoint"),
    ):
        status, _, err = called(run, "checkpoint", *arguments)
        assert status == 2 and words in err and err.count("\n") == 1
