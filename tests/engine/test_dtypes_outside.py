"""Models in low precision that keep buffers in fp32, ask weights for their dtype, or are entered by another method."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import assert_same, rows_of, snapshot
from tests.quick import full


class Rotary(nn.Module):
    """A block whose frequencies are a buffer that must stay fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("frequencies", 1e4 ** -(torch.arange(6.0) / 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.frequencies.dtype == torch.float32
        return x + torch.tanh(self.inner(x * (torch.arange(3.0)[:, None] * self.frequencies).cos()))


class Vision(nn.Module):
    """Normalises its input by buffers, casts it to its weights' dtype, and adds positions that are a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(4, 6)
        self.register_buffer("mean", torch.full((4,), 0.1))
        self.register_buffer("deviation", torch.full((4,), 1.3))
        self.register_buffer("positions", torch.arange(18.0).view(3, 6).sin(), persistent=False)
        self.blocks = nn.ModuleList(Rotary() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def encode(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / self.deviation
        x = self.patches(x.to(self.patches.weight.dtype)) + self.positions
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


ENTRIES: dict[str, Callable[[Vision, Tensor], Tensor]] = {
    "forward": lambda model, x: model(x),
    "another method": lambda model, x: model.encode(x),
}


def train(model: nn.Module, entry: str) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = rows_of(model, torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(step)))
        ENTRIES[entry](model, x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Vision()


def in_low_precision(zero: int, entry: str) -> dict[str, Tensor]:
    model = pl.parallelize(build(), Strategy(zero=zero, precision="bfloat16", bucket_mb=1e-4))  # type: ignore[arg-type]
    found = train(model, entry)
    pl.release(model)
    return found


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("zero", [0, 3])
def test_what_meets_fp32_buffers_is_cast(ranks, zero: int, entry: str) -> None:
    for found in ranks(2, in_low_precision, zero, entry):
        assert_same(found, train(build(), entry), atol=0.01)


class Scaled(nn.Module):
    """What it returns is in fp32, as a buffer of it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Beside(nn.Module):
    """Hands what one block returns to the next one's `forward`, which no hook of a module sees."""

    def __init__(self) -> None:
        super().__init__()
        plain = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        self.blocks = nn.ModuleList([Scaled(), plain, Scaled()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


def beside(zero: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: nn.Module = Beside()
    if zero >= 0:
        model = pl.parallelize(model, Strategy(zero=zero, precision="bfloat16", bucket_mb=1e-4))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        model(rows_of(model, x)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = snapshot(model)
    if zero >= 0:
        pl.release(model)
    return found


@pytest.mark.parametrize("zero", [0, full(1), full(2), 3])
def test_what_fp32_buffers_make_enters_another_unit_by_its_forward(ranks, zero: int) -> None:
    for found in ranks(2, beside, zero):
        assert_same(found, beside(-1), atol=0.02)


def frozen(zero: int, every: bool) -> list[Tensor]:
    """What a model whose parameters are frozen, all or some, answers: whole, copied and released."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    (model if every else model[0]).requires_grad_(False)
    x = torch.linspace(-1, 1, 12).view(3, 4)
    with torch.no_grad():
        expected = model(x)
        pl.parallelize(model, Strategy(zero=zero, precision="bfloat16", bucket_mb=1e-4))  # type: ignore[arg-type]
        model(x)
        with pl.full_parameters(model):
            whole = model(x)
        copied = copy.deepcopy(model)(x)
        assert model[0].weight.dtype == torch.bfloat16
        answers = [whole, copied, pl.release(model)(x)]
    return [expected, *answers]


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("zero", range(4))
def test_frozen_parameters_are_in_their_own_dtype_where_all_are_whole(ranks, zero: int, every: bool) -> None:
    for expected, *answers in ranks(2, frozen, zero, every):
        for answer in answers:
            torch.testing.assert_close(answer, expected, atol=0.02, rtol=0)


def appended(zero: int) -> str:
    """What is said of a layer that is of another precision than the model's, as nobody cast it."""
    strategy = Strategy(zero=zero, precision="bfloat16")  # type: ignore[arg-type]
    model = pl.parallelize(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model.append(nn.Linear(2, 2))
    with pytest.raises(EngineError) as caught:
        model(torch.ones(2, 4))
    pl.release(model)
    return str(caught.value)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_layer_that_is_added_in_low_precision_is_told_before_it_computes(ranks, zero: int) -> None:
    for message in ranks(2, appended, zero):
        assert message.startswith("2 was added to the model after pl.parallelize")
