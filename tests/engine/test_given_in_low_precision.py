"""What a model and its units do to what they are given, where that is cast to low precision for them."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.strategy import Strategy


class Adds(nn.Module):
    """Adds to a list and a dictionary that it is given, as blocks do with losses of their routers, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, losses: list[torch.Tensor], more: tuple[dict[str, torch.Tensor]]
    ) -> torch.Tensor:
        # What is computed from tensors in them is so in low precision.
        x = self.linear(x) + sum(self.linear(each.expand(8)).sum() for each in losses) * 0
        losses.append(x.float().square().mean())
        more[0][f"mean {len(losses)}"] = x.float().mean()
        more[0].pop("first", None)
        return x


class FillsList(nn.Module):
    """Sums up what its blocks have added."""

    def __init__(self, mapping: Callable[..., dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self.mapping = mapping
        self.blocks = nn.ModuleList(Adds() for _ in range(3))

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> tuple[torch.Tensor, list[str]]:
        more = self.mapping(first=torch.ones(()))
        for block in self.blocks:
            x = block(x, losses, (more,))
        return torch.stack(list(losses)).sum() + sum(more.values()), sorted(more)


def added(
    zero: int, sequence: Callable[..., Any], mapping: Callable[..., Any]
) -> tuple[list[str], list[torch.dtype], bool]:
    model = pl.parallelize(FillsList(mapping), Strategy(zero=zero, precision="bfloat16"))
    first = torch.zeros(())
    losses = sequence([first])
    loss, names = model(torch.ones(2, 8), losses)
    loss.backward()
    pl.release(model)
    return names, [each.dtype for each in losses], losses[0] is first


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(
    ("sequence", "mapping"), [(list, dict), (deque, OrderedDict), (list, functools.partial(defaultdict, float))]
)
def test_what_units_add_to_collections_is_there_for_who_gave_them(ranks, zero, sequence, mapping) -> None:
    names = [f"mean {number}" for number in (2, 3, 4)]
    for found in ranks(2, added, zero, sequence, mapping):
        assert found == (names, [torch.float32] * 4, True)


class CountsIn(nn.Module):
    """Adds its loss to what it is given, in which there is nothing before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, losses: dict[str, torch.Tensor]) -> torch.Tensor:
        losses["square"] += self.linear(x).square().mean()
        return x


def counted_in(zero: int) -> bool:
    model, losses = pl.parallelize(CountsIn(), Strategy(zero=zero, precision="bfloat16")), defaultdict(float)
    model(torch.ones(2, 8), losses)
    losses["square"].backward()
    trained = all(parameter.grad is not None for parameter in model.parameters())
    pl.release(model)
    return trained


@pytest.mark.parametrize("zero", [0, 2])
def test_an_empty_one_of_the_loops_own_is_filled(ranks, zero) -> None:
    assert ranks(2, counted_in, zero) == [True] * 2


class Remembers(nn.Module):
    """Writes its state to a tensor that it is given, as a memory or a cell does."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, state: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.tanh(self.cell(x) + state)
        with torch.no_grad():
            state.copy_(out)
            more["calls"].add_(1)
        return out


def remembered(zero: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    torch.manual_seed(0)
    model = pl.parallelize(nn.ModuleList([Remembers()]), Strategy(zero=zero, precision="bfloat16"))
    state, left, more, x = torch.zeros(2, 8), torch.ones(2, 8), {"calls": torch.zeros(())}, torch.ones(2, 8)
    for _ in range(3):
        out = model[0](x, state, more)
        out.float().square().mean().backward()
    pl.release(model)
    return state, out.detach().float(), more["calls"], torch.equal(left, x)


@pytest.mark.parametrize("zero", [0, 2])
def test_what_they_write_to_tensors_is_there(ranks, zero: int) -> None:
    for state, out, calls, is_kept in ranks(2, remembered, zero):
        assert state.dtype == calls.dtype == torch.float32
        assert torch.equal(state, out) and calls == 3 and is_kept


@dataclass
class Batch:
    x: torch.Tensor
    kept: torch.Tensor
    note: torch.Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    kept: torch.Tensor
    note: torch.Tensor | None = None


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    kept: torch.Tensor
    note: torch.Tensor | None = None
    more: torch.dtype | None = None


class OwnClass:
    def __init__(self, x: torch.Tensor, kept: torch.Tensor) -> None:
        self.x, self.kept, self.note = x, kept, None


class ReadsBatch(nn.Module):
    """Leaves a note in a batch that is an object, and an attribute that it did not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))

    def forward(self, batch: Any) -> torch.Tensor:
        out: torch.Tensor = nn.functional.linear(batch.x, self.inner[0].weight)
        # A frozen dataclass, too.
        object.__setattr__(batch, "note", out.float().detach())
        object.__setattr__(batch, "more", batch.x.dtype)
        return out


def read(zero: int, kind: Callable[..., Any]) -> tuple[torch.dtype, bool, torch.dtype, torch.dtype]:
    model = pl.parallelize(nn.ModuleList([ReadsBatch()]), Strategy(zero=zero, precision="bfloat16"))
    x, kept = torch.ones(2, 8), torch.ones(())
    batch = kind(x=x, kept=kept)
    out = model[0](batch)
    out.float().sum().backward()
    pl.release(model)
    return out.dtype, batch.x is x and batch.kept is kept, batch.note.dtype, batch.more


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", [Batch, Frozen, Slotted, SimpleNamespace])
def test_tensors_of_an_object_are_cast_and_it_is_the_loops_own_afterwards(ranks, zero: int, kind) -> None:
    for found in ranks(2, read, zero, kind):
        assert found == (torch.bfloat16, True, torch.float32, torch.bfloat16)


def read_uncast(kind: Callable[..., Any]) -> list[str]:
    model = pl.parallelize(nn.Sequential(ReadsBatch()), Strategy(precision="bfloat16"))
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(kind(x=torch.ones(2, 8), kept=torch.ones(())))
    pl.release(model)
    return caught.value.__notes__


def test_what_is_not_cast_is_told_of(ranks) -> None:
    for notes in ranks(2, read_uncast, OwnClass):
        assert len(notes) == 1 and "computes in bfloat16" in notes[0] and "x.to(weight.dtype)" in notes[0]


class ReadsTree(nn.Module):
    """Is given a node that knows the one above it, and a tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, node: SimpleNamespace, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        first.add_(1)
        out: torch.Tensor = self.linear(node.above.below.x) + second
        return out


def read_in_a_circle() -> tuple[torch.dtype, float, bool]:
    model = pl.parallelize(nn.ModuleList([ReadsTree()]), Strategy(precision="bfloat16"))
    node, x = SimpleNamespace(x=torch.zeros(2, 8)), torch.zeros(2, 8)
    node.above = SimpleNamespace(below=node)
    with torch.no_grad():
        out = model[0](node, x, x) - model[0].linear.bias
    pl.release(model)
    return out.dtype, float((out.float() - 1).abs().max()), bool((x == 1).all()) and node.above.below is node


def test_what_lies_in_several_places_is_one(ranks) -> None:
    for dtype, off, is_kept in ranks(2, read_in_a_circle):
        assert dtype == torch.bfloat16 and off < 0.02 and is_kept
