"""What a loop keeps and replaces of gradients is what it would be in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import paceline as pl
from paceline.buffers.flat_gradients import FlatGradients
from paceline.buffers.handed_out import HandedOut
from paceline.core.strategy import Strategy
from tests.buffers.loops import ON_GPUS, STRATEGIES, build, every_strategy, gpu_memory, loss_of
from tests.quick import some
from tests.ranks import RankPool


def train(model: nn.Module, keep: Callable[[Tensor], Tensor], rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """Adds the gradients of one loss, kept while those of another are computed, to these."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first: dict[nn.Parameter, Tensor] = {}
    for step in range(3):
        loss_of(model, step, rank, ranks).backward()
        kept = {p: keep(p.grad) for p in model.parameters() if p.grad is not None}
        first = first or kept
        optimizer.zero_grad()
        loss_of(model, step + 50, rank, ranks).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5 + kept[parameter] * 2 + first[parameter]
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


KEEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
}


def trained(strategy: Strategy, keep: str) -> dict[str, Tensor]:
    world = pl.init()
    model = pl.parallelize(build(), strategy)
    state = train(model, KEEPS[keep], world.rank, world.world_size)
    pl.release(model)
    return state


@pytest.mark.parametrize("keep", KEEPS)
@every_strategy
def test_kept_gradients_stay_and_others_take_their_place(ranks: RankPool, name: str, keep: str) -> None:
    expected = train(build(), KEEPS["itself"])
    for state in ranks(2, trained, STRATEGIES[name], keep):
        torch.testing.assert_close(state, expected, atol=1e-12, rtol=0)


# ---- where a storage does not move, as on GPUs


def trained_in_gpu_memory(strategy: Strategy, keep: str) -> dict[str, Tensor]:
    with gpu_memory():
        return trained(strategy, keep)


@pytest.mark.parametrize("keep", some(KEEPS, ["itself"]))
@pytest.mark.parametrize("name", some(ON_GPUS, ["zero 0", "zero 1, each"]))
def test_kept_gradients_stay_in_memory_that_does_not_move(ranks: RankPool, name: str, keep: str) -> None:
    expected = train(build(), KEEPS["itself"])
    for state in ranks(2, trained_in_gpu_memory, ON_GPUS[name], keep):
        torch.testing.assert_close(state, expected, atol=1e-12, rtol=0)


def keeping_one(model: nn.Module, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """Each step adds up two losses' gradients, but for one parameter, whose first is kept and added at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one = next(iter(model.parameters()))
    for step in range(3):
        loss_of(model, step, rank, ranks).backward()
        kept, one.grad = one.grad, None
        loss_of(model, step + 50, rank, ranks).backward()
        if one.grad is not None and kept is not None:
            one.grad = one.grad * 0.25 + kept
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def one_kept(strategy: Strategy, on_gpus: bool) -> dict[str, Tensor]:
    with gpu_memory() if on_gpus else nullcontext():
        world = pl.init()
        model = pl.parallelize(build(), strategy)
        state = keeping_one(model, world.rank, world.world_size)
        pl.release(model)
    return state


@pytest.mark.parametrize("on_gpus", [False, True], ids=["moves", "stays"])
@pytest.mark.parametrize("name", some(ON_GPUS, ["zero 0", "zero 2"]))
def test_others_gradients_are_added_to_where_one_is_kept(ranks: RankPool, name: str, on_gpus: bool) -> None:
    expected = keeping_one(build())
    for state in ranks(2, one_kept, ON_GPUS[name], on_gpus):
        torch.testing.assert_close(state, expected, atol=1e-12, rtol=0)


def taken(strategy: Strategy) -> int:
    """How often other memory is taken where a loop keeps nothing."""
    found: list[None] = []
    with gpu_memory(), patch.object(FlatGradients, "take_other_memory", lambda self: found.append(None)):
        ordinary(strategy)
    return len(found)


@pytest.mark.parametrize("name", some(ON_GPUS, ["zero 1, each"]))
def test_no_other_memory_is_taken_for_a_loop_that_keeps_nothing(ranks: RankPool, name: str) -> None:
    assert ranks(2, taken, ON_GPUS[name]) == [0, 0]


def ordinary(strategy: Strategy) -> int:
    """How often memory that a loop kept is moved, where it keeps none."""
    moved = []
    forget = HandedOut.release

    def watched(self: HandedOut, name: str, known: Mapping[int, int]) -> bool:
        before = name in self._memory
        stays = forget(self, name, known)
        moved.append(before and name not in self._memory)
        return stays

    HandedOut.release = watched  # type: ignore[method-assign]
    try:
        world = pl.init()
        model = pl.parallelize(build().float(), strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(4):
            for batch in pl.accumulate(model, range(3)):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step * 3 + batch + world.rank))
                loss = model(x).square().mean()
                loss.backward()
            pl.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        pl.release(model)
    finally:
        HandedOut.release = forget  # type: ignore[method-assign]
    assert moved
    return sum(moved)


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
@every_strategy
def test_nothing_is_moved_for_a_loop_that_keeps_nothing(ranks: RankPool, name: str, precision: str) -> None:
    assert ranks(2, ordinary, replace(STRATEGIES[name], precision=precision)) == [0, 0]


def replaced_in_low(zero: int) -> list[float]:
    """The fp32 gradients' sums before and after they are replaced, and the steps that they give."""
    model = pl.parallelize(build().float(), Strategy(zero=zero, precision="bfloat16"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pl.full_parameters(model):
        before = parameters_to_vector(model.parameters()).clone()
    model(torch.ones(2, 6)).square().mean().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0
            parameter.grad = torch.zeros_like(parameter.grad) + 1
    optimizer.step()
    with pl.full_parameters(model):
        moved = before - parameters_to_vector(model.parameters())
    pl.release(model)
    return [moved.min().item(), moved.max().item()]


@pytest.mark.parametrize(
    "zero", [0, 3, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)]
)
def test_gradients_are_replaced_in_low_precision(ranks: RankPool, zero: int) -> None:
    for found in ranks(2, replaced_in_low, zero):
        assert found == pytest.approx([1.0, 1.0], abs=1e-6)


def whole_gradients(zero: int) -> dict[str, Tensor]:
    model = pl.parallelize(build(), Strategy(zero=zero))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    for index, parameter in enumerate(model.parameters()):
        if parameter.grad is not None:
            parameter.grad = torch.full_like(parameter, index + 1.0)
    optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pl.release(model)
    return state


@pytest.mark.parametrize("zero", [2, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_gradients_of_a_parameters_own_shape_are_cut_to_shards(ranks: RankPool, zero: int) -> None:
    expected = {name: value - 0.1 * (index + 1) for index, (name, value) in enumerate(build().state_dict().items())}
    for state in ranks(2, whole_gradients, zero):
        torch.testing.assert_close(state, expected, atol=1e-12, rtol=0)
