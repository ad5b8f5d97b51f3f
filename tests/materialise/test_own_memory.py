"""Parameters without memory of their own are refused by name before anything is laid out."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import paceline as pl
from tests.engine.models import assert_same, snapshot


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
        pl.parallelize(make(), pl.Strategy(zero=1))


@pytest.mark.parametrize("name", ["the same", "in part", "of other dtypes"])
def test_where_parameters_stay_they_may_share_memory(name: str) -> None:
    make, _ = REFUSED[name]
    for found, expected in zip(pl.parallelize(make()).parameters(), make().parameters(), strict=True):
        assert torch.equal(found, expected) and found.data_ptr() == expected.data_ptr()
    make, words = REFUSED["columns"]
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


class Stacked(nn.Module):
    """Blocks whose weights are slices of one tensor, as stacked checkpoints have them, and a head before them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        stacked = torch.randn(4, 6, 6) / 3
        self.head = nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        for block, weight in zip(self.blocks, stacked, strict=True):
            block[0].weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained_stacked(strategy: pl.Strategy | None) -> dict[str, torch.Tensor]:
    model = Stacked()
    model.head.weight.grad = torch.ones(3, 6)
    parameters = list(model.parameters())
    if strategy is not None:
        pl.parallelize(model, strategy)
    assert all(mine is other for mine, other in zip(parameters, model.parameters(), strict=True))
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize("zero", [2, 3])
def test_slices_of_one_tensor_are_parameters_like_others(ranks, zero: int) -> None:
    for found in ranks(2, trained_stacked, pl.Strategy(zero=zero)):
        assert_same(found, trained_stacked(None), atol=1e-6)


def edited_slice() -> str:
    """An edit of one at zero 3, where it would be lost."""
    model = pl.parallelize(Stacked(), pl.Strategy(zero=3))

    def edit(block: nn.Module, *_: object) -> None:
        block[0].weight.data.mul_(2)

    model.blocks[1].register_forward_pre_hook(edit)
    with pytest.raises(pl.EngineError) as raised:
        for _ in range(2):
            model(torch.ones(2, 6)).square().mean().backward()
    return str(raised.value)


def hooked_slice() -> str:
    model = Stacked()
    for block in model.blocks:
        block[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(pl.UserError) as raised:
        pl.parallelize(model, pl.Strategy(zero=3))
    return str(raised.value)


def test_edits_of_one_slice_are_seen_and_one_with_hooks_is_refused(ranks) -> None:
    assert all("blocks.1.0.weight was edited" in told for told in ranks(2, edited_slice))
    assert all("blocks.0.0.weight was made of a part of a tensor" in told for told in ranks(2, hooked_slice))
