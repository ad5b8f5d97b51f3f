"""The guide docs/your_own_loop.md does what it says: its blocks run in order, as one process and as ranks."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.nn import functional as F

import paceline as pl
from tests.quick import diagonal
from tests.ranks import RankPool
from tests.train.processes import finished, program

PAGE = (Path(__file__).parent.parent / "docs" / "your_own_loop.md").read_text()
STRATEGY = 'zero=3, precision="bf16"'
SECTIONS = {
    heading: re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    for heading, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}


class Reader:
    """Someone who types the guide's blocks one after another, with another strategy or other numbers."""

    def __init__(self, folder: str, instead: dict[str, str]) -> None:
        self.folder = folder
        self.instead = instead
        self.names: dict[str, Any] = {"__name__": "guide"}

    def reads(self, *sections: str) -> None:
        """Types all blocks of some sections."""
        for section in sections:
            for number in range(len(SECTIONS[section])):
                self.types(section, number)

    def types(self, section: str, number: int) -> None:
        """Types one block."""
        text = SECTIONS[section][number]
        for old, new in self.instead.items():
            text = text.replace(old, new)
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()):
            exec(compile(text, section, "exec"), self.names)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def read_all(folder: str, strategy: str) -> dict[str, Any]:
    """What a rank has learnt at the end of each section."""
    reader = Reader(folder, {STRATEGY: strategy})
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found: dict[str, Any] = {}
    for section in SECTIONS:
        reader.reads(section)
        found[section] = weights_of(reader.model)
        if section == "Save and load":
            found["plain"] = weights_of(reader.plain)
    found.update({name: reader.names.get(name) for name in ("error", "error_alone", "skipped", "norm")})
    pl.barrier()
    return found


def made_in(folder: str, name: str) -> str:
    path = Path(folder, name)
    path.mkdir()
    return str(path)


@pytest.fixture
def folder() -> Any:
    with tempfile.TemporaryDirectory() as made:
        yield made


@pytest.mark.parametrize(("zero", "precision"), diagonal(["3", "0", "1", "2"], ["bf16", "fp32"], quick=()))
def test_two_ranks_learn_what_one_process_does(ranks: RankPool, folder: str, zero: str, precision: str) -> None:
    strategy = f'zero={zero}, precision="{precision}"'
    (alone,) = ranks(1, read_all, made_in(folder, "alone"), strategy)
    both = ranks(2, read_all, made_in(folder, "both"), strategy)
    near = {"rtol": 0.05, "atol": 0.02} if precision == "bf16" else {"rtol": 1e-3, "atol": 1e-5}
    for found in both:
        for section in ("Data-parallel", "Accumulate, clip, schedule", "Uneven ends"):
            torch.testing.assert_close(found[section], alone[section], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found["Save and load"], alone["Save and load"], **near)
        torch.testing.assert_close(found["plain"], found["Save and load"], rtol=0, atol=0)
        torch.testing.assert_close(found["After an exception"], both[0]["After an exception"], rtol=0, atol=0)
        assert found["error"] == both[0]["error"] == pytest.approx(alone["error"], rel=0.05)
        assert found["skipped"] == alone["skipped"] == 1
    assert both[0]["error_alone"] == pytest.approx(both[0]["error"], rel=0.05 if precision == "bf16" else 1e-5)
    assert both[1]["error_alone"] is None
    assert alone["error"] < 0.5


# ---- uneven ends


def read_uneven_ends(folder: str) -> tuple[list[torch.Tensor], int]:
    # A row more than fills two ranks' micro-batches: in the last step one rank has none.
    reader = Reader(folder, {"200": "193", "range(2)": "range(0)"})
    reader.reads("The plain script", "Data-parallel", "Accumulate, clip, schedule", "Uneven ends")
    return weights_of(reader.model), len(reader.loader)


def test_every_row_counts_once_where_ranks_have_different_numbers_of_them(ranks: RankPool, folder: str) -> None:
    ((alone, _),) = ranks(1, read_uneven_ends, folder)
    (first, more), (second, fewer) = ranks(2, read_uneven_ends, folder)
    assert more == fewer + 1
    for found in (first, second):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)


# ---- saving and loading


def go_on_and_resume(folder: str, strategy: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    reader = Reader(folder, {STRATEGY: strategy})
    reader.reads("The plain script", "Data-parallel", "Sharded, in bf16", "Evaluate")

    def one_more_step() -> list[torch.Tensor]:
        reader.loss_on(*(part[: 8 + reader.world.rank] for part in reader.dataset.tensors)).backward()
        reader.optimizer.step()
        reader.scheduler.step()
        reader.optimizer.zero_grad()
        return weights_of(reader.model)

    reader.types("Save and load", 0)
    going_on = one_more_step()
    reader.types("Save and load", 1)
    return going_on, one_more_step()


@pytest.mark.parametrize(("zero", "precision"), diagonal(["3", "0", "1", "2"], ["bf16", "fp32"], quick={("3", "bf16")}))
def test_who_resumes_goes_on_as_if_nothing_had_been(ranks: RankPool, folder: str, zero: str, precision: str) -> None:
    for n in (1, 2):
        for going_on, resumed in ranks(
            n, go_on_and_resume, made_in(folder, str(n)), f'zero={zero}, precision="{precision}"'
        ):
            torch.testing.assert_close(resumed, going_on, rtol=0, atol=0)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[torch.Tensor]:
    """The weights after a step on the same rows on every rank."""
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    F.mse_loss(model(rows), rows[:, :2]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return weights_of(model)


def made(zero: int | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    if zero is not None:
        pl.parallelize(model, pl.Strategy(zero=zero))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def take_states_elsewhere(of: int | None, to: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model, optimizer = made(of)
    step(model, optimizer, 0)
    weights, states = model.state_dict(), optimizer.state_dict()
    weights, states = {name: value.clone() for name, value in weights.items()}, copy.deepcopy(states)
    other, others = made(to)
    other.load_state_dict(weights)
    others.load_state_dict(states)
    return step(model, optimizer, 1), step(other, others, 1)


@pytest.mark.parametrize(("of", "to"), [(0, None), (None, 2), (0, 3)])
def test_whole_optimizer_states_load_everywhere(ranks: RankPool, of: int | None, to: int | None) -> None:
    for here, there in ranks(2, take_states_elsewhere, of, to):
        torch.testing.assert_close(there, here)


def save_tied_weights(folder: str, zero: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    pl.parallelize(model, pl.Strategy(zero=zero))
    weights = model.state_dict()
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(weights, f"{folder}/tied.safetensors")
    with pytest.raises(RuntimeError) if zero else contextlib.nullcontext():
        save_model(model, f"{folder}/tied-model-{pl.init().rank}.safetensors")
    path = f"{folder}/tied-{pl.init().rank}"
    torch.save(weights, path)
    assert torch.equal(torch.load(path)["1.weight"], weights["0.weight"])
    del weights["1.weight"]
    save_file(weights, f"{path}.safetensors")


@pytest.mark.parametrize("zero", [0, 3])
def test_tied_weights_are_saved_as_the_guide_says(ranks: RankPool, folder: str, zero: int) -> None:
    ranks(2, save_tied_weights, folder, zero)


# ---- what rank 0 can do alone

ALONE: dict[str, Callable[[nn.Module], object]] = {
    "evaluate": lambda model: model(torch.ones(2, 4)),
    "state_dict": lambda model: model.state_dict(),
}


def act_alone(call: str, strategy: pl.Strategy, works: bool) -> None:
    model = pl.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), strategy)
    step(model, torch.optim.AdamW(model.parameters()), 0)
    alone = pytest.raises(pl.CommunicationError) if not works else contextlib.nullcontext()
    if pl.init().rank == 0:
        with torch.no_grad(), alone:
            ALONE[call](model)
        pl.barrier()
    elif works:
        pl.barrier()
    else:
        with pytest.raises(pl.CommunicationError):
            pl.barrier()
        pl.barrier()


@pytest.mark.parametrize(
    ("call", "zero", "precision", "works"),
    [
        ("evaluate", 2, "float32", True),
        ("evaluate", 3, "float32", False),
        ("state_dict", 2, "float32", True),
        ("state_dict", 0, "bfloat16", True),
        ("state_dict", 1, "bfloat16", False),
        ("state_dict", 3, "float32", False),
    ],
)
def test_what_rank_0_can_do_alone(ranks: RankPool, call: str, zero: int, precision: str, works: bool) -> None:
    ranks(2, act_alone, call, pl.Strategy(zero=zero, precision=precision), works)


# ---- starting


@pytest.mark.full
def test_torchrun_on_each_host_starts_one_job(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (line,) = re.findall(r"^torchrun --nnodes .*$", PAGE, re.M)
    words = line.replace("host0:29500", address).replace("--nproc-per-node 8", "--nproc-per-node 1").split()[1:]
    words[-1] = str(Path(__file__).parent.parent / words[-1])
    # Two hosts in one.
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *words]
    with program(command, tmp_path) as other:
        status, out, err = finished(command, tmp_path, timeout=120)
        ended, text, _ = other.finish()
    assert (status, ended) == (0, 0), err
    assert (out + text).count("2 ranks, loss 0.0") == 1
