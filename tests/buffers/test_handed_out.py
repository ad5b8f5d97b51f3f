"""What a loop keeps, replaces and assigns, of gradients and weights, is what it would be in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import paceline as pl
from paceline.buffers.flat_gradients import FlatGradients
from paceline.buffers.handed_out import HandedOut
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.as_on_gpus import as_on_gpus
from tests.quick import some
from tests.ranks import RankPool

STRATEGIES = {
    "zero 0": Strategy(bucket_mb=1e-4),
    "zero 0, each": Strategy(bucket_mb=1e-4, accumulation="each"),
    "zero 1": Strategy(zero=1, bucket_mb=1e-4),
    "zero 1, each": Strategy(zero=1, accumulation="each"),
    "zero 2": Strategy(zero=2),
    "zero 3": Strategy(zero=3),
    "one copy": Strategy(zero=2, share_parameters=True),
}
QUICK = ("zero 0", "zero 2", "zero 3")
every_strategy = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in STRATEGIES]
)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss_of(model: nn.Module, seed: int, rank: int = 0, ranks: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, width, dtype=torch.float64, generator=generator) for width in (6, 3))
    return (model(x.chunk(ranks)[rank]) - y.chunk(ranks)[rank]).square().mean()


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


@contextmanager
def gpu_memory() -> Iterator[None]:
    """Inside, models that are made parallel take their buffers for a GPU's."""
    with as_on_gpus(), patch("paceline.buffers.handed_out._can_move", lambda tensor: False):
        yield


def trained_in_gpu_memory(strategy: Strategy, keep: str) -> dict[str, Tensor]:
    with gpu_memory():
        return trained(strategy, keep)


ON_GPUS = {name: strategy for name, strategy in STRATEGIES.items() if not strategy.share_parameters}


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


def taken(strategy: Strategy) -> tuple[int, bool]:
    """How often other memory is taken where a loop keeps nothing, and whether it waits for weights."""
    found: list[None] = []
    with gpu_memory(), patch.object(FlatGradients, "take_other_memory", lambda self: found.append(None)):
        ordinary(strategy)
        return len(found), waits(strategy)


@pytest.mark.parametrize("name", some(ON_GPUS, ["zero 1, each"]))
def test_no_other_memory_is_taken_for_a_loop_that_keeps_nothing(ranks: RankPool, name: str) -> None:
    assert ranks(2, taken, ON_GPUS[name]) == [(0, False)] * 2


def averaged_in_gpu_memory(strategy: Strategy) -> tuple[Tensor, Tensor]:
    with gpu_memory():
        return averaged(strategy)


@pytest.mark.parametrize("name", some(ON_GPUS, ["zero 1"]))
def test_weights_kept_from_before_a_step_are_read_after_it_there_too(ranks: RankPool, name: str) -> None:
    if ON_GPUS[name].gathers:
        pytest.skip("weights that are let go are not kept")
    expected = averaged(None)
    for found in ranks(2, averaged_in_gpu_memory, replace(ON_GPUS[name], bucket_mb=0.02)):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


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


def swap(model: nn.Module, value: float) -> None:
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(torch.full_like(vector, value), model.parameters())


READS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Tensor]] = {
    "state_dict": lambda model, _: model.state_dict()["0.weight"],
    "deepcopy": lambda model, _: copy.deepcopy(model)[0].weight,  # type: ignore[index]
    "full": lambda model, _: full(model),
    "reset": lambda model, _: (pl.reset(model), model.state_dict()["0.weight"])[1],
    "evaluation": lambda model, _: (evaluate(model), model.state_dict()["0.weight"])[1],
    "other weights loaded": lambda model, _: (
        model.load_state_dict({"0.bias": torch.zeros(8, dtype=torch.float64)}, strict=False),
        model.state_dict()["0.weight"],
    )[1],
    "empty step": lambda model, optimizer: (optimizer.step(), model.state_dict()["0.weight"])[1],
    "release": lambda model, _: pl.release(model)[0].weight,
}


def full(model: nn.Module) -> Tensor:
    with pl.full_parameters(model):
        return model[0].weight.detach().clone()  # type: ignore[index]


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, 6, dtype=torch.float64))


def given_other_data(zero: int) -> dict[str, tuple[float, float]]:
    found = {}
    for name, read in READS.items():
        model = pl.parallelize(build(), Strategy(zero=zero))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        swap(model, 7.0)
        value = read(model, optimizer)
        found[name] = (value.min().item(), value.max().item())
        if name != "release":
            pl.release(model)
    return found


@pytest.mark.parametrize("zero", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_weights_given_other_data_count_whatever_reads_them_first(ranks: RankPool, zero: int) -> None:
    for found in ranks(2, given_other_data, zero):
        assert found == dict.fromkeys(READS, (7.0, 7.0))


def refused(strategy: Strategy) -> dict[str, str]:
    told = {}
    for name in ("state_dict", "deepcopy", "full", "other weights loaded", "empty step"):
        model = pl.parallelize(build().float(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(1, 6))
        for parameter in model.parameters():
            # Reading makes them plain, which takes what is assigned.
            parameter.data = parameter.data * 0.9
        with pytest.raises(EngineError) as caught:
            READS[name](model, optimizer)
        told[name] = str(caught.value)
    return told


@pytest.mark.parametrize(
    "strategy",
    [STRATEGIES["one copy"], *(Strategy(zero=zero, precision="bfloat16") for zero in (0, 2))],
    ids=["one copy", "zero 0, bf16", "zero 2, bf16"],
)
def test_weights_given_other_data_are_refused_where_they_would_be_lost(ranks: RankPool, strategy: Strategy) -> None:
    for told in ranks(2, refused, strategy):
        assert all("was edited, but this rank updates" in message for message in told.values()), told


def averaged(strategy: Strategy | None) -> tuple[Tensor, Tensor]:
    """An average of weights by way of what was kept of them before the first step, and the weights of a kept state."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).double()
    world = pl.init()
    ranks = 1 if strategy is None else world.world_size
    if strategy is not None:
        model = pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kept = [parameter.data for parameter in model.parameters()]
    means = [weight.clone() for weight in kept]
    for step in range(4):
        x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model(x.chunk(ranks)[world.rank % ranks]).square().mean().backward()
        optimizer.step()
        torch._foreach_lerp_(means, kept, 0.5)
        optimizer.zero_grad()
    found = torch.cat([mean.flatten() for mean in means]), torch.cat([weight.flatten() for weight in kept])
    if strategy is not None:
        pl.release(model)
    return found[0].clone(), found[1].clone()


@pytest.mark.parametrize(
    "name", ["zero 1", *(pytest.param(name, marks=pytest.mark.full) for name in ("zero 0", "zero 2"))]
)
def test_weights_kept_from_before_a_step_are_read_after_it(ranks: RankPool, name: str) -> None:
    expected = averaged(None)
    for found in ranks(2, averaged, replace(STRATEGIES[name], bucket_mb=0.02)):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def waits(strategy: Strategy) -> bool:
    """Whether a loop that keeps no weights waits at the end of its steps."""
    model = pl.parallelize(build(), strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = pl.engine_of(model).program.parameters
    found = False
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        found |= parameters.flat.has_aliases
        optimizer.zero_grad()
        model.state_dict()
    pl.release(model)
    return found


@pytest.mark.parametrize("name", ["zero 1", "one copy", pytest.param("zero 2", marks=pytest.mark.full)])
def test_a_loop_that_keeps_no_weights_does_not_wait(ranks: RankPool, name: str) -> None:
    assert ranks(2, waits, STRATEGIES[name]) == [False, False]
