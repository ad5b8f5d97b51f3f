"""What is computed again finds lists, dictionaries and buffers as they were, and leaves them as they are."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from paceline.models.as_before import ChangedBuffers
from paceline.models.plain_values import SMALL
from paceline.models.recompute import recompute
from tests.engine.models import snapshot


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.map(x))


class Averages(nn.Module):
    """Replaces a buffer in each forward, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return torch.tanh(self.map(x - self.mean))


class InDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, found: dict[str, Any]) -> dict[str, Any]:
        found["x"] = self.map(found["x"]).tanh() * found.get("times", 1)
        found["times"] = found.get("times", 1) + 1
        return found


class InList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, found: list[Tensor]) -> list[Tensor]:
        found.append(self.map(found[-1]).tanh() + len(found) * found[0])
        return found


class InOrderedDictionary(InDictionary):
    pass


class InDefaultDictionary(InDictionary):
    pass


class InDeque(InList):
    pass


GIVEN: dict[type[nn.Module], Callable[[Tensor], Any]] = {
    InDictionary: lambda x: {"x": x},
    InOrderedDictionary: lambda x: OrderedDict(x=x),
    InDefaultDictionary: lambda x: defaultdict(int, x=x),
    InList: lambda x: [x],
    InDeque: lambda x: deque([x], maxlen=3),
}
"""What a block is given that adds to it."""


class Chain(nn.Module):
    """Blocks one after the other, or each given what all before have found."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        given: Any = GIVEN.get(type(self.blocks[0]), lambda x: x)(x)
        for block in self.blocks:
            given = block(given)
        if isinstance(given, dict):
            return given["x"] * given["times"]
        return given[-1] if isinstance(given, (list, deque)) else given


class Remembers(nn.Module):
    """Keeps tensors in plain attributes, which its first forward makes, and counts in one that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)
        self.count = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.map(x) + getattr(self, "former", 0.0) + self.count)
        self.former = 0.5 * y.detach().mean(0)
        self.count += 1
        return y


class Masked(nn.Module):
    """Has buffers that no forward writes to, a small one and a large one, and computes with both."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1, 8))
        self.register_buffer("table", torch.ones(SMALL // 8 + 1, 8))
        self.scale: Tensor
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.map(x) * self.scale * self.table[: len(x)]
        return nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0]


BLOCKS = [Normed, Spectral, Averages, *GIVEN, Remembers, Masked]


def trained(model: nn.Module, rank: int = 0) -> dict[str, Tensor]:
    """Weights and buffers after steps of two micro-batches whose forwards come before their backwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        losses = [model(torch.randn(4, 8, generator=generator, dtype=torch.float64)).square().mean() for _ in range(2)]
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return snapshot(model) | buffers


def build(block: Callable[[], nn.Module]) -> Chain:
    torch.manual_seed(0)
    return Chain(block).double()


@pytest.mark.parametrize("how", ["unit", "keep_attention"])
@pytest.mark.parametrize("block", BLOCKS)
def test_training_is_the_same(block: Callable[[], nn.Module], how: Any) -> None:
    plain, again = build(block), build(block)
    recompute(list(again.blocks), how, 1)
    expected, found = trained(plain), trained(again)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def with_strategy(block: Callable[[], nn.Module], strategy: Strategy) -> dict[str, Tensor]:
    world = pl.init()
    model = pl.parallelize(build(block), strategy=strategy)
    values = trained(model, world.rank)
    values = {name: value.clone() for name, value in model.state_dict().items()} if strategy.zero == 3 else values
    pl.release(model)
    return values


@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("block", [Normed, Spectral])
def test_so_it_is_among_ranks(ranks: Any, block: Callable[[], nn.Module], zero: Any) -> None:
    plain, again = (ranks(2, with_strategy, block, Strategy(zero=zero, recompute=how)) for how in ("none", "unit"))
    for expected, found in zip(plain, again, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-14)


def trained_with(change: Callable[[Chain], object], again: bool) -> dict[str, Tensor]:
    """As `trained`, of blocks with batch norm; `change` is called after the first step."""
    model = build(Normed)
    if again:
        recompute(list(model.blocks), "unit", 1)
    first = model.blocks[0]
    first[1].eval()
    trained(model)
    change(model)
    return trained(model)


def train_all(model: Chain) -> None:
    model.train()


def renew(model: Chain) -> None:
    model.blocks[0][1] = nn.BatchNorm1d(8).double()  # type: ignore[index]


def add_one(model: Chain) -> None:
    model.blocks[0][1].register_buffer("extra", torch.zeros(1))  # type: ignore[index,union-attr]


@pytest.mark.parametrize("change", [train_all, renew, add_one])
def test_what_changes_its_buffers_only_later_is_right_too(change: Callable[[Chain], None]) -> None:
    expected, found = (trained_with(change, again) for again in (False, True))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Shares(nn.Module):
    """One submodule writes to a buffer that another computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.writes, self.reads = nn.Linear(8, 8), nn.Module(), nn.Module()
        self.writes.register_buffer("seen", torch.zeros(8, dtype=torch.float64))
        self.reads.register_buffer("seen", self.writes.seen)

    def forward(self, x: Tensor) -> Tensor:
        self.writes.seen.add_(x.detach().mean(0))  # type: ignore[operator,union-attr]
        return torch.tanh(self.map(x) + self.reads.seen)


def test_a_buffer_in_two_places_stays_one() -> None:
    plain, again = build(Shares), build(Shares)
    recompute(list(again.blocks), "unit", 1)
    expected, found = trained(plain), trained(again)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Late(nn.Module):
    """Has two large buffers, of which it writes to one in each forward and to the other from the second on."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)
        self.register_buffer("always", torch.zeros(300, 300))
        self.register_buffer("late", torch.zeros(300, 300))
        self.always: Tensor
        self.late: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.always[0, 0] > 0:
            self.late += 1
        self.always += 1
        y: Tensor = self.map(x) + self.late[0, 0]
        return y


def test_a_large_buffer_that_is_written_to_late_is_refused_by_its_name() -> None:
    model = build(Late)
    recompute(list(model.blocks), "unit", 1)
    x = torch.randn(4, 8, dtype=torch.float64)
    model(x).sum().backward()
    with pytest.raises(EngineError, match="Late: its forward wrote to the buffer late"):
        model(x)


def test_large_buffers_that_forwards_leave_alone_are_copied_once() -> None:
    block = nn.Linear(2, 2)
    block.register_buffer("mask", torch.ones(300, 300))
    buffers = ChangedBuffers(block)
    before = buffers.before([block])
    assert len(before) == 1
    buffers.watch(lambda: block(torch.ones(2)), before, [block])
    assert not before and not buffers.before([block])


def test_a_forward_that_the_loop_gave_a_block_meanwhile_stays() -> None:
    model = build(Normed)
    first, second, third = model.blocks
    handles = recompute([first, second, third], "unit", 1)
    own = first.forward = lambda x: x  # type: ignore[method-assign]
    del second.forward
    for handle in handles:
        handle.remove()
    assert first.forward is own and "forward" not in second.__dict__ and "forward" not in third.__dict__
