"""Weights that a loop assigns or keeps are what they would be in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.buffers.loops import ON_GPUS, STRATEGIES, build, gpu_memory, loss_of
from tests.quick import some
from tests.ranks import RankPool


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
    [STRATEGIES["shared parameters"], *(Strategy(zero=zero, precision="bfloat16") for zero in (0, 2))],
    ids=["shared parameters", "zero 0, bf16", "zero 2, bf16"],
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


def averaged_in_gpu_memory(strategy: Strategy) -> tuple[Tensor, Tensor]:
    with gpu_memory():
        return averaged(strategy)


@pytest.mark.parametrize("name", some(ON_GPUS, ["zero 1"]))
def test_weights_kept_from_before_a_step_are_read_after_it_there_too(ranks: RankPool, name: str) -> None:
    if ON_GPUS[name].gathers:
        pytest.skip("weights that are resharded are not kept")
    expected = averaged(None)
    for found in ranks(2, averaged_in_gpu_memory, replace(ON_GPUS[name], bucket_mb=0.02)):
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


@pytest.mark.parametrize("name", ["zero 1", "shared parameters", pytest.param("zero 2", marks=pytest.mark.full)])
def test_a_loop_that_keeps_no_weights_does_not_wait(ranks: RankPool, name: str) -> None:
    assert ranks(2, waits, STRATEGIES[name]) == [False, False]


def waits_in_gpu_memory(strategy: Strategy) -> bool:
    with gpu_memory():
        return waits(strategy)


@pytest.mark.parametrize("name", some(ON_GPUS, ["zero 1, each"]))
def test_a_loop_that_keeps_no_weights_does_not_wait_there_either(ranks: RankPool, name: str) -> None:
    assert ranks(2, waits_in_gpu_memory, ON_GPUS[name]) == [False, False]
