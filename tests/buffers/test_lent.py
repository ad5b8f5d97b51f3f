"""Tensors kept of whole parameters, or given to them: as their memory goes in plain PyTorch, or refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import Stack, assert_same, in_parallel, loss_on, make, rows, snapshot
from tests.quick import full as only_in_full

SHARED = Strategy(zero=2, share_parameters=True)
PLACES: dict[str, Strategy] = {
    **{f"zero {zero}": Strategy(zero=zero) for zero in range(4)},
    "zero 3, hold": Strategy(zero=3, accumulation="hold"),
    "shared parameters": SHARED,
}
EVERYWHERE = [place if place in ("zero 2", "zero 3") else only_in_full(place) for place in PLACES]


def whole(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    return pl.full_parameters(model) if hasattr(model, "no_sync") else contextlib.nullcontext()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    if next(model.parameters()).dtype is not torch.float64:
        model(rows(model, seed)[0].float()).square().mean().backward()
    else:
        loss_on(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_a_list_of_before(model: nn.Module) -> list[dict[str, Tensor]]:
    """Reads and scales weights by way of tensors that were collected once, as averages and constraints are written."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with whole(model):
        kept = [parameter.data for parameter in model.parameters()]
        average = [weight.clone() for weight in kept]
    for seed in range(4):
        step(model, optimizer, seed)
        with whole(model):
            torch._foreach_lerp_(average, kept, 0.3)
            torch._foreach_mul_(kept, 0.9)
    return [snapshot(model), {str(index): weight.clone() for index, weight in enumerate(average)}]


def refused(strategy: Strategy, way: str) -> str:
    """What is said where such tensors are written to when they are no parameters' memory."""
    model = pl.parallelize(make().to(torch.float32 if strategy.low else torch.float64), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gives = pl.full_parameters(model) if way != "given outside" else contextlib.nullcontext()
    with gives, torch.no_grad():
        if way == "kept":
            written = [parameter.data for parameter in model.parameters()][-1]
        else:
            written = parameters_to_vector(model.parameters()).clone()
            vector_to_parameters(written, model.parameters())
    step(model, optimizer, 0)
    before = snapshot(model)
    written.mul_(0.9)
    with pytest.raises(EngineError) as caught:
        step(model, optimizer, 1)
    if strategy.zero < 3 and not strategy.low:
        assert_same({name: p.detach() for name, p in model.named_parameters()}, before, atol=0)
    return str(caught.value)


LOW = Strategy(zero=2, precision="bfloat16")
WAYS = {
    "kept": [Strategy(zero=3), SHARED, LOW],
    "given": [Strategy(zero=1), Strategy(zero=3), SHARED, LOW],
    "given outside": [Strategy(zero=1), Strategy(zero=2), SHARED, LOW],
}


@pytest.mark.parametrize(("way", "strategy"), [(way, strategy) for way, each in WAYS.items() for strategy in each])
def test_what_is_written_there_in_between_is_refused(ranks, way: str, strategy: Strategy) -> None:
    for told in ranks(2, refused, strategy, way):
        assert "given to it by p.data = ..., was written to" in told or "was written to by way of a tensor" in told


def evolved(model: nn.Module) -> list[dict[str, Tensor]]:
    """A flat vector that is changed in place and given to the parameters again, as evolution strategies do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whole(model), torch.no_grad():
        vector = parameters_to_vector(model.parameters()).clone()
    found = []
    for seed in range(3):
        with whole(model), torch.no_grad():
            vector.copy_(parameters_to_vector(model.parameters()))
            vector.mul_(1.1)
            vector_to_parameters(vector, model.parameters())
        step(model, optimizer, seed)
        found.append(snapshot(model))
    return found


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("loop", [with_a_list_of_before, evolved])
def test_what_a_loop_keeps_and_gives_is_the_parameters_memory(ranks, place: str, loop: Any) -> None:
    expected = loop(make())
    for found in ranks(2, in_parallel, PLACES[place], Stack, loop):
        for each, wanted in zip(found, expected, strict=True):
            assert_same(each, wanted)


def dropped(strategy: Strategy) -> list[int]:
    """How much of what a loop has dropped is still kept, after a vector that many parameters were given, and a list."""
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    former = pl.engine_of(model).program.parameters.flat.former
    found = []
    for way in ("given", "kept"):
        with pl.full_parameters(model), torch.no_grad():
            if way == "given":
                kept = parameters_to_vector(model.parameters()).clone()
                vector_to_parameters(kept, model.parameters())
            else:
                kept = [parameter.data for parameter in model.parameters()]
        found.append(len(former.lent._kept) + len(former._kept))
        del kept
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        found.append(len(former.lent._kept) + len(former._kept))
    return found


@pytest.mark.parametrize("strategy", [Strategy(zero=1), Strategy(zero=3), SHARED], ids=["zero 1", "zero 3", "shared"])
def test_what_a_loop_has_dropped_is_kept_no_longer(ranks, strategy: Strategy) -> None:
    for given, left, kept, dropped_too in ranks(2, dropped, strategy):
        assert given > 1 and left == dropped_too == 0
        assert (kept > 0) == (strategy != Strategy(zero=1))
