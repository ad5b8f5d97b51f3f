"""Values beside the model come back as they were given, or are refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl


def parallel() -> nn.Module:
    return pl.parallelize(nn.Linear(2, 2))


def test_dictionaries_keep_their_order(tmp_path: Path) -> None:
    model, given = parallel(), {"b": 1, "a": {"z": 2, "y": 3}, 3: 4}
    pl.save(tmp_path / "at 0", model, step=0, extra=given)
    assert repr(pl.load(tmp_path / "at 0", model).extra) == repr(given)


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.ones(2).cdouble()])
def test_tensors_that_cannot_be_written_are_named(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(pl.UserError, match=r"extra\['here'\] is a tensor o.*(meta|sparse|complex128)"):
        pl.save(tmp_path / "at 0", parallel(), step=0, extra={"here": tensor})
    assert not list(tmp_path.iterdir())


def itself() -> list[Any]:
    held: list[Any] = []
    held.append({"again": held})
    return held


def test_what_holds_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pl.UserError, match="extra holds itself, or is nested too deeply"):
        pl.save(tmp_path / "at 0", parallel(), step=0, extra=itself())
    assert not list(tmp_path.iterdir())


def with_a_buffer_that_no_file_has(path: Path) -> str:
    module = nn.Linear(2, 2)
    module.register_buffer("phases", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(pl.UserError) as caught:
        pl.save(path / "at 0", pl.parallelize(module), step=0)
    return str(caught.value)


def test_buffers_that_cannot_be_written_are_named(ranks, tmp_path: Path) -> None:
    for message in ranks(2, with_a_buffer_that_no_file_has, tmp_path):
        assert "phases is a tensor of torch.complex128, which a checkpoint cannot hold" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [-1, 1.5, torch.tensor(2.0), None, 2**64])
def test_a_step_that_could_not_be_read_again_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(pl.UserError, match="a whole number from 0 up, got"):
        pl.save(tmp_path / "at 0", parallel(), step=step)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)])
def test_a_step_may_be_any_whole_number(tmp_path: Path, step: Any) -> None:
    model = parallel()
    pl.save(tmp_path / "at 3", model, step=step)
    assert pl.load(tmp_path / "at 3", model).step == 3


def of_other_steps(path: Path) -> str:
    with pytest.raises(pl.CommunicationError) as caught:
        pl.save(path / "x", parallel(), step=pl.init().rank)
    return str(caught.value)


def test_ranks_that_count_otherwise_are_told(ranks, tmp_path: Path) -> None:
    for message in ranks(2, of_other_steps, tmp_path):
        assert "pl.save of step 0" in message and "pl.save of step 1" in message


class Silent:
    """Fails on the last rank, and says nothing."""

    def state_dict(self) -> dict[str, Any]:
        if pl.init().rank == pl.init().world_size - 1:
            raise NotImplementedError
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Never called."""


def of_a_silent_loader(path: Path) -> str:
    with pytest.raises((NotImplementedError, pl.UserError)) as caught:
        pl.save(path / "x", parallel(), step=1, loader=Silent())
    return repr(caught.value)


def test_an_error_without_words_is_one(ranks, tmp_path: Path) -> None:
    first, last = ranks(2, of_a_silent_loader, tmp_path)
    assert "rank 1: NotImplementedError" in first and last == "NotImplementedError()"
    assert not (tmp_path / "x" / "manifest.json").exists()


def test_a_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = parallel()
    assert pl.save("~/x", model, step=1).path == tmp_path / "x"
    assert pl.load("~/x", model).step == 1


class Place:
    """A loader's."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == self.state_dict()


def with_one_loader(path: Path) -> str:
    model = parallel()
    pl.save(path / "x", model, step=1, loader=Place() if pl.init().rank == 0 else None)
    with pytest.raises(pl.UserError) as caught:
        pl.load(path / "x", model, loader=Place())
    return str(caught.value)


def test_a_loader_that_one_rank_had_is_said(ranks, tmp_path: Path) -> None:
    for message in ranks(2, with_one_loader, tmp_path):
        assert "saved without a loader on rank 1" in message


class Moody:
    """A scheduler that takes its state on some ranks only."""

    def state_dict(self) -> dict[str, Any]:
        return {"rank": pl.init().rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if pl.init().rank == 0:
            raise KeyError("pace")


def taken_up_by_some(path: Path) -> str:
    model = parallel()
    pl.save(path / "at 0", model, step=0, scheduler=Moody())
    with pytest.raises(pl.UserError) as caught:
        pl.load(path / "at 0", model, scheduler=Moody())
    return str(caught.value)


def test_what_one_rank_cannot_take_up_ends_the_load_on_all(ranks, tmp_path: Path) -> None:
    for message in ranks(2, taken_up_by_some, tmp_path):
        assert message == "rank 0: a module, scheduler, loader or generator does not take its state: KeyError: 'pace'"


@pytest.mark.parametrize("where", [torch.inference_mode, partial(torch.device, "meta"), torch.no_grad])
def test_where_tensors_are_made_otherwise_all_is_as_ever(tmp_path: Path, where: Callable[[], Any]) -> None:
    model = parallel()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(1, 2)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    extra = {"tensor": torch.ones(3), "scalar": torch.tensor(2.0)}
    with where():
        pl.save(tmp_path / "at 1", model, optimizer, step=1, extra=extra, background=True)
        found = pl.load(tmp_path / "at 1", model, optimizer).extra
    assert torch.equal(found["tensor"], extra["tensor"]) and torch.equal(found["scalar"], extra["scalar"])
    step()
    # Into the memory of the copies that were made there.
    pl.save(tmp_path / "at 2", model, optimizer, step=2, background=True).wait()


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(4)[::4],
        torch.tensor([1 + 2j, 3 + 4j]).conj().imag,
        torch.tensor(1 + 2j),
        np.array([1, 2], dtype=">i4"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ],
    ids=["one of a stride", "negative", "complex", "of another byte order", "by columns"],
)
def test_elements_come_back_whatever_way_they_lie_in_memory(tmp_path: Path, given: Any) -> None:
    model = parallel()
    pl.save(tmp_path / "at 0", model, step=0, extra=given)
    found = pl.load(tmp_path / "at 0", model).extra
    assert type(found) is type(given) and found.shape == given.shape
    assert (torch.equal if isinstance(given, torch.Tensor) else np.array_equal)(found, given)


@pytest.mark.parametrize(
    "given",
    [
        np.longdouble(1),
        np.ones(2, np.longdouble),
        np.ma.array([1, 2], mask=[0, 1]),
        np.array(["a"]),
        {1},
        torch.float32,
    ],
)
def test_what_would_come_back_as_something_else_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(pl.UserError, match=r"extra\['here'\] is a .*, which a checkpoint cannot hold"):
        pl.save(tmp_path / "at 0", parallel(), step=0, extra={"here": given})
