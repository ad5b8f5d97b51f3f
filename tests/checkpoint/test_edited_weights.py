"""What a loop did to weights by hand before a save is in it, or the save is refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from tests.buffers.loops import build
from tests.quick import full


def other_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, 7.0)


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(7.0)


def shared(model: nn.Module) -> None:
    if pl.init().rank == 0:
        model.share_memory()


EDITS: dict[str, Callable[[nn.Module], None]] = {"other data": other_data, "by data": by_data, "shared": shared}


def saved(folder: Path, strategy: pl.Strategy, edit: str) -> tuple[str, list[Tensor]]:
    """What `pl.save` said, and the weights that are in it, if it said nothing."""
    model = pl.parallelize(build().float(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    EDITS[edit](model)
    try:
        pl.save(folder / "step-1", model, optimizer, step=1)
    except (pl.EngineError, pl.UserError) as error:
        return str(error), []
    other = pl.parallelize(build().float(), strategy)
    pl.load(folder, other)
    return "", list(other.state_dict().values())


@pytest.mark.parametrize("zero", [1, pytest.param(0, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_weights_given_other_data_are_saved(ranks, tmp_path: Path, zero: int) -> None:
    for said, weights in ranks(2, saved, tmp_path, pl.Strategy(zero=zero), "other data"):
        assert not said and all((weight == 7).all() for weight in weights)


@pytest.mark.parametrize("zero", [2, pytest.param(0, marks=pytest.mark.full)])
def test_edits_that_are_lost_in_low_precision_are_refused(ranks, tmp_path: Path, zero: int) -> None:
    for said, _ in ranks(2, saved, tmp_path, pl.Strategy(zero=zero, precision="bfloat16"), "by data"):
        assert "was edited, but this rank updates" in said
    assert not list(tmp_path.iterdir())


def test_every_rank_is_told_where_one_has_moved_its_weights(ranks, tmp_path: Path) -> None:
    for said, _ in ranks(2, saved, tmp_path, pl.Strategy(zero=1), "shared"):
        assert "as model.share_memory() does" in said


def edited(path: Path, strategy: pl.Strategy) -> list[float]:
    model = pl.parallelize(nn.Linear(4, 4), strategy)
    with pl.full_parameters(model):
        nn.init.constant_(model.weight, 7)
        with pytest.raises(pl.EngineError, match="inside `with"):
            pl.save(path / "x", model, step=1)
    pl.save(path / "x", model, step=1)
    with pl.full_parameters(model), pytest.raises(pl.EngineError, match="inside `with"):
        pl.load(path / "x", model)
    pl.load(path / "x", model)
    return model.state_dict()["weight"].unique().tolist()


@pytest.mark.parametrize("strategy", [pl.Strategy(zero=1, precision="bfloat16"), full(pl.Strategy(zero=3))])
def test_what_is_edited_is_saved_when_it_counts(ranks, tmp_path: Path, strategy: pl.Strategy) -> None:
    assert ranks(2, edited, tmp_path, strategy) == [[7.0], [7.0]]


def edited_in_place(path: Path) -> list[float]:
    model = pl.parallelize(nn.Linear(4, 4), pl.Strategy())
    with pl.full_parameters(model):
        nn.init.constant_(model.weight, 7)
        pl.save(path / "x", model, step=1)
        nn.init.constant_(model.weight, 8)
        pl.load(path / "x", model)
    return model.state_dict()["weight"].unique().tolist()


def test_what_is_edited_where_nothing_is_ever_hidden_counts_at_once(ranks, tmp_path: Path) -> None:
    assert ranks(2, edited_in_place, tmp_path) == [[7.0], [7.0]]
