"""What is given beside the model is understood, or refused in words that say what to give, alike on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = pl.parallelize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_none_of_a_kind_may_be_said(tmp_path: Path) -> None:
    model, _ = built()
    pl.save(tmp_path / "at 1", model, None, step=1, scheduler=None, loader=None, rng=None, extra=None)
    assert pl.load(tmp_path / "at 1", model, None, scheduler=None, loader=None, rng=None).step == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"optimizer": "scheduler"}, r"optimizer: expected one of torch.*, got LambdaLR"),
        ({"scheduler": 3}, "scheduler: expected an object with state_dict and load_state_dict.*, got int"),
        ({"loader": torch.utils.data.DataLoader([1])}, "loader: .*StatefulDataLoader, got DataLoader: leave it out"),
    ],
)
def test_what_keeps_no_state_is_refused_before_anything_is_written(
    tmp_path: Path, given: dict[str, Any], expected: str
) -> None:
    model, optimizer = built()
    if "optimizer" in given:
        given = {"optimizer": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)}
    with pytest.raises(pl.UserError, match=expected):
        pl.save(tmp_path / "at 1", model, step=1, **given)
    assert not list(tmp_path.iterdir())
    pl.save(tmp_path / "at 1", model, step=1)
    with pytest.raises(pl.UserError, match=expected):
        pl.load(tmp_path / "at 1", model, **given)


def where_ranks_give_others(path: Path) -> list[str]:
    model, optimizer = built()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    rank, told = pl.init().rank, []
    pl.save(path / "good", model, optimizer, step=1)
    for one, other in (([], [optimizer]), ([optimizer], [first])):
        given = one if rank else other
        for call in (
            lambda given=given: pl.save(path / "bad", model, given, step=1),
            lambda given=given: pl.load(path / "good", model, given),
        ):
            with pytest.raises(pl.CommunicationError) as caught:
                call()
            told.append(str(caught.value))
    assert not (path / "bad" / "manifest.json").exists()
    return told


def test_ranks_that_give_other_optimizers_are_told(ranks, tmp_path: Path) -> None:
    for told in ranks(2, where_ranks_give_others, tmp_path):
        assert all("rank 1: pl." in message and "with weights alone" in message for message in told[:2])
        assert all("SGD of 4 parameters" in message and "SGD of 2 parameters" in message for message in told[2:])
