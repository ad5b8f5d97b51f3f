"""torch.autocast around the forward of a parallel float32 model: N ranks equal one process under autocast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import STAGES, Stack, assert_same, data, make, shares, snapshot, stages
from tests.engine.test_architectures import Repeated
from tests.quick import diagonal

STEPS = 3

WHOLE_BATCH = 4e-3
"""How far weights are after three steps, where some moved by 50 times as much: bf16 keeps 8 bits, and the gradient of
a whole batch is rounded elsewhere than those of its parts."""

PARTS = 1e-6
"""With the same parts of the batch all roundings are the same, and what is left is the order of sums in fp32."""


def build(cls: type[nn.Module]) -> nn.Module:
    return make(cls).float()


def loss_on(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        output = model(x.float())
    assert output.dtype == torch.bfloat16
    return F.mse_loss(output.float(), y.float())


def in_parallel(strategy: Strategy, cls: type[nn.Module]) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """Weights after training, and the dtypes of what an optimizer sees."""
    model = pl.parallelize(build(cls), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dtypes = set()
    for step in range(STEPS):
        x, y = map(shares, data(step, 12))
        loss_on(model, x, y).backward()
        dtypes |= {tensor.dtype for p in model.parameters() for tensor in (p, p.grad) if tensor is not None}
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    pl.release(model)
    return state, dtypes


def by_one(cls: type[nn.Module], parts: int) -> dict[str, Tensor]:
    """The same in one process and plain PyTorch, which computes the batch in so many parts."""
    model = build(cls)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = data(step, 12)
        for part in range(parts):
            # Each in an autocast of its own, as a rank's is: inside one, casts of weights are kept, and their
            # gradients are added up in bf16.
            (loss_on(model, x[part::parts], y[part::parts]) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@stages
def test_under_autocast_ranks_equal_one_process_on_the_whole_batch(ranks, strategy) -> None:
    expected, before = by_one(Stack, 1), snapshot(build(Stack))
    assert max((expected[name] - before[name]).abs().max() for name in before) > 50 * WHOLE_BATCH
    for state, _ in ranks(2, in_parallel, strategy, Stack):
        assert_same(state, expected, atol=WHOLE_BATCH)


# A block that runs twice in one forward is cast once: the cast outlives the unit's first turn to be whole.
@pytest.mark.parametrize(("strategy", "cls"), diagonal(STAGES, {"Repeated": Repeated, "Stack": Stack}))
def test_under_autocast_ranks_equal_one_process_on_their_parts(ranks, strategy, cls) -> None:
    expected = by_one(cls, 2)
    for state, dtypes in ranks(2, in_parallel, strategy, cls):
        assert_same(state, expected, atol=PARTS)
        assert dtypes == {torch.float32}, "autocast leaves parameters and gradients what they are"


@pytest.mark.parametrize("strategy", STAGES.values(), ids=STAGES)
def test_what_is_computed_again_is_under_autocast_too(ranks, strategy) -> None:
    expected = by_one(Stack, 2)
    for state, _ in ranks(2, in_parallel, replace(strategy, recompute="unit"), Stack):
        assert_same(state, expected, atol=PARTS)


def test_autocast_makes_a_difference_to_these_models() -> None:
    model, plain = build(Stack), build(Stack)
    x, y = data(0, 12)
    apart = (loss_on(model, x, y) - F.mse_loss(plain(x.float()), y.float())).abs()
    assert apart > 1e-5
