"""What is exported has the names and the whole values of the model's `state_dict`, whoever saved it."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline as pl
from tests.checkpoint.training import built
from tests.engine.models import STAGES, snapshot
from tests.quick import full
from tests.train.processes import called


def saved(folder: Path, strategy: pl.Strategy) -> dict[str, Tensor]:
    model = pl.parallelize(built(), strategy)
    pl.save(folder, model, step=1, extra={"places": [np.arange(3)]})
    return snapshot(model)


@pytest.mark.parametrize("stage", ["zero 3", full("zero 0")])
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_plain_model_takes_it(ranks, tmp_path: Path, stage: str, form: str) -> None:
    expected, _ = ranks(2, saved, tmp_path / "checkpoint", STAGES[stage])
    status, _, err = called(tmp_path, "checkpoint", "export", "checkpoint", "--format", form, "--out", "w")
    assert (status, err) == (0, "")
    if form == "torch":
        whole = torch.load(tmp_path / "w", weights_only=True)
        assert whole["extra"]["places"][0].tolist() == [0, 1, 2] and whole["step"] == 1
    state = load_file(tmp_path / "w") if form == "safetensors" else whole["model"]
    # Tied parameters under each of their names, too.
    model = built()
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "w"]


def test_a_disk_that_fills_leaves_nothing(tmp_path: Path) -> None:
    model = pl.parallelize(nn.Linear(64, 64))
    pl.save(tmp_path / "checkpoint", model, step=1)
    pl.release(model)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, unlimited[1]))
    try:
        for form in ("safetensors", "torch"):
            status, _, err = called(tmp_path, "checkpoint", "export", "checkpoint", "--format", form, "--out", "w")
            assert status == 2 and "w cannot be written: File too large: choose another --out" in err
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_a_disk_that_is_not_there_is_named_and_nothing_left(ranks, tmp_path: Path) -> None:
    ranks(1, saved, tmp_path / "checkpoint", STAGES["zero 0"])
    for form in ("safetensors", "torch", "huggingface"):
        flags = ("--format", form, "--out", "no/such/folder/w")
        status, _, err = called(tmp_path, "checkpoint", "export", "checkpoint", *flags)
        assert status == 2 and err.count("\n") == 1 and ("cannot be written" in err or form == "huggingface")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_damage_is_found_before_it_is_passed_on(ranks, tmp_path: Path) -> None:
    ranks(1, saved, tmp_path / "checkpoint", STAGES["zero 0"])
    path = tmp_path / "checkpoint" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 3] ^= 1
    path.write_bytes(data)
    for form in ("safetensors", "torch"):
        status, _, err = called(tmp_path, "checkpoint", "export", "checkpoint", "--format", form, "--out", "w")
        assert status == 2 and "checksum" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
