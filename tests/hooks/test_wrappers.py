"""Models that torch's own wrappers train are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.core.strategy import Strategy


def model_of_two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def wrapped_inside(kind: str) -> str:
    pl.init()
    model = model_of_two()
    if kind == "ddp":
        model[1] = DistributedDataParallel(model[1])
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[1])
    with pytest.raises(pl.UserError) as raised:
        pl.parallelize(model, Strategy(zero=1))
    return str(raised.value)


@pytest.mark.parametrize(("kind", "words"), [("ddp", "1 is a Distributed"), ("fsdp", "1.weight is a DTensor")])
def test_wrapped_parts_are_refused_by_name(ranks, kind: str, words: str) -> None:
    for said in ranks(2, wrapped_inside, kind):
        assert words in said


def wrapped_around(zero: int) -> str:
    model = pl.parallelize(model_of_two(), Strategy(zero=zero))  # type: ignore[arg-type]
    wrapper = DistributedDataParallel(model)
    said = ""
    try:
        wrapper(torch.ones(3, 4)).square().mean().backward()
    except pl.UserError as error:
        said = str(error)
    pl.reset(model)
    pl.release(model)
    return said


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_wrapper_around_shards_is_refused(ranks, zero: int) -> None:
    for said in ranks(2, wrapped_around, zero):
        assert ("the parallel Sequential is inside a DistributedDataParallel" in said) is (zero > 0)
