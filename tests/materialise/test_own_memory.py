"""Parameters without memory of their own are refused by name before anything is laid out."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import paceline as pl


def of(*values: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for index, tensor in enumerate(values):
        model.register_parameter("abc"[index], nn.Parameter(tensor))
    return model


memory = torch.arange(48.0)

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.LazyLinear(3), "weight has no shape before the model"),
    "a lazy buffer": (lambda: nn.LazyBatchNorm1d(affine=False), "running_mean has no shape before the model has run"),
    "expanded": (lambda: of(torch.ones(1, 3).expand(4, 3)), "elements of a share memory with each other"),
    "striding over itself": (lambda: of(memory.as_strided((4, 4), (2, 1))), "elements of a share memory"),
    "the same": (lambda: of(memory[:6], memory[:6]), "b and a are two parameters in the same memory"),
    "in part": (lambda: of(memory[:6], memory[20:30], memory[4:8]), "c and a are two parameters in the same memory"),
    "columns": (lambda: of(memory.view(6, 8)[:, :5], memory.view(6, 8)[:, 4:]), "b and a are two parameters"),
    "of other dtypes": (lambda: of(memory[4:6].view(torch.float64), memory[5:7]), "b and a are two parameters"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_would_come_apart_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(pl.UserError, match=words):
        pl.parallelize(make())


ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    "side by side": lambda: of(memory[:6], memory[6:8], memory[8:]),
    "columns": lambda: of(memory.view(6, 8)[:, :4], memory.view(6, 8)[:, 4:]),
    "every other": lambda: of(memory[::2], memory[1::2]),
    "with gaps": lambda: of(memory.view(6, 8)[::2, ::3]),
    "transposed": lambda: of(memory.view(6, 8).t()),
    "empty": lambda: of(memory[:0], memory[:0], memory),
}


@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED)
def test_what_has_memory_of_its_own_in_one_storage_keeps_its_values(make: Callable[[], nn.Module]) -> None:
    for found, expected in zip(pl.parallelize(make()).parameters(), make().parameters(), strict=True):
        assert torch.equal(found, expected)


def sharded_after_release() -> tuple[bool, str]:
    """Whether a model that was released a moment ago may be sharded, and what is said where a tensor of it is kept."""
    model = pl.release(pl.parallelize(nn.Linear(4, 2)))
    gc.disable()
    try:
        pl.release(pl.parallelize(model, pl.Strategy(zero=3)))
    finally:
        gc.enable()
    kept = model.weight.detach()
    with pytest.raises(pl.UserError) as raised:
        pl.parallelize(model, pl.Strategy(zero=3))
    return kept.shape == (2, 4), str(raised.value)


def test_garbage_of_a_released_engine_keeps_no_parameters_memory(ranks) -> None:
    for is_whole, said in ranks(2, sharded_after_release):
        assert is_whole and said.startswith("parallelize: a tensor that was taken from weight before")
