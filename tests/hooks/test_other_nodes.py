"""Low precision: graphs that are run backward after parameters had data of another dtype for a while.

Torch gives such a parameter another node that accumulates its gradient than these graphs have.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.hooks.parameters import accumulator
from paceline.tensors.assigned_gradient import set_gradient
from tests.engine.models import snapshot

RANKS = 2


def make() -> nn.Module:
    """Its last parameter of all comes first in backward, is of one dimension, and lies in rank 0's shard alone."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def losses(model: nn.Module, rank: int, dtype: torch.dtype) -> list[Tensor]:
    return [model(batch(number, rank).to(dtype)).float().square().mean() for number in range(2)]


def two_graphs(strategy: pl.Strategy, between: str) -> dict[str, Any]:
    """Both are made before the first is run backward; what that leaves stays."""
    world = pl.init()
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first, second = losses(model, world.rank, torch.float32)
    first.backward()
    if between == "full_parameters":
        with pl.full_parameters(model):
            pass
    elif between == "state_dict":
        model.state_dict()
    second.backward()
    optimizer.step()
    state = snapshot(model)
    pl.release(model)
    return state


def by_one(gradients: str) -> dict[str, Tensor]:
    """One process, fp32 masters."""
    master, sums = make(), [torch.zeros_like(p) for p in make().parameters()]
    for number in range(2):
        for rank in range(RANKS):
            low = make().bfloat16()
            losses(low, rank, torch.bfloat16)[number].backward()
            for total, parameter in zip(sums, low.parameters(), strict=True):
                total += parameter.grad.float() / (RANKS if gradients == "mean" else 1)
    with torch.no_grad():
        for parameter, total in zip(master.parameters(), sums, strict=True):
            parameter -= total
    return master.state_dict()


# At zero 3 `full_parameters` gathers into what graphs keep, which torch refuses in any precision.
PLACES = [(zero, what) for zero in range(4) for what in ("nothing", "state_dict", "full_parameters")][:-1]


@pytest.mark.full
@pytest.mark.parametrize(("zero", "between"), PLACES)
@pytest.mark.parametrize("gradients", ["mean", "sum"])
def test_two_backwards_add_up(ranks, zero: int, gradients: str, between: str) -> None:
    strategy = pl.Strategy(zero=zero, precision="bfloat16", bucket_mb=1e-5, gradients=gradients)
    expected = by_one(gradients)
    for state in ranks(RANKS, two_graphs, strategy, between):
        for name, value in expected.items():
            torch.testing.assert_close(state[name].float(), value, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (2, 4)])
def test_a_gradient_of_another_kind_leaves_the_node_in_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    parameter, gradient = nn.Parameter(torch.zeros(2, 4, dtype=torch.bfloat16)), torch.ones(shape, dtype=dtype)
    graph, place = parameter * 2, gradient.data_ptr()
    before = accumulator(parameter)
    set_gradient(parameter, gradient)
    assert accumulator(parameter) is before and graph.grad_fn is not None
    assert parameter.dtype == torch.bfloat16 and parameter.shape == (2, 4)
    assert parameter.grad is gradient and gradient.data_ptr() == place
    assert gradient.dtype == dtype and gradient.shape == shape and gradient.eq(1).all()
