"""Units that are compiled, and models compiled around them, train as without, also where units are computed again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.strategy import Strategy
from paceline.models.transformer import Transformer
from tests.engine.models import STAGES, assert_same
from tests.models.test_recompute import build, recomputed, trained
from tests.quick import some


def compile_forwards(model: Transformer) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


def compile_in_place(model: Transformer) -> None:
    for block in model.blocks:
        block.compile()


def replace_by_compiled(model: Transformer) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block)  # type: ignore[assignment]


COMPILED = {
    "forward": (compile_forwards, [replace(STAGES["zero 3"], recompute="unit")]),
    "in place": (compile_in_place, [STAGES["zero 1"], STAGES["zero 3"]]),
    "replaced": (replace_by_compiled, [STAGES["zero 2"], STAGES["zero 3"]]),
}
"""Each way where parameters come and go, two where they stay: what is made of them is the same code. All ways at all
stages, without such code, are in tests/engine/test_compiling.py."""


def compiled(compile_blocks: Callable[[Transformer], None], strategies: list[Strategy]) -> list[tuple[dict, dict, int]]:
    """Gradients and weights by each strategy, in one job as compiling takes long, and how many graphs were compiled."""
    world = pl.init()
    results = []
    for strategy in strategies:
        # What was compiled for another model counts towards how often a function may be.
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = build()
        compile_blocks(model)
        pl.parallelize(model, strategy)
        found, state = trained(model, world.rank, world.world_size)
        pl.release(model)
        results.append((found, state, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return results


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for CPUs needs a C++ compiler")
@pytest.mark.parametrize("way", some(COMPILED, set()))
def test_units_may_be_compiled(ranks, way: str) -> None:
    expected, weights, _ = ranks(1, recomputed, None)[0]
    for results in ranks(2, compiled, *COMPILED[way], timeout=200):
        for found, state, graphs in results:
            assert_same(found, expected, atol=1e-10)
            assert_same(state, weights, atol=1e-8)
            assert graphs == 1, "one serves all blocks in all steps"


def compiled_whole(strategies: list[Strategy], before: bool) -> list[tuple[dict, dict]]:
    world = pl.init()
    results = []
    for strategy in strategies:
        torch._dynamo.reset()
        plain = build()
        # What is in question is whether hooks survive being traced, not what code is made of the rest.
        if before:
            called = parallel = pl.parallelize(torch.compile(plain, backend="eager"), strategy)
        else:
            parallel = pl.parallelize(plain, strategy)
            called = torch.compile(parallel, backend="eager")
        results.append(trained(parallel, world.rank, world.world_size, called))
        pl.release(parallel)
    return results


# A smaller model, also in a plain `pytest`, and at all stages: tests/engine/test_compiling.py.
@pytest.mark.full
@pytest.mark.parametrize(
    ("strategies", "before"),
    [
        pytest.param([STAGES["zero 3"], STAGES["zero 2"]], False, id="after it is made parallel"),
        pytest.param([STAGES["zero 3"], STAGES["zero 1"]], True, id="before it"),
    ],
)
def test_a_whole_model_may_be_compiled(ranks, strategies, before) -> None:
    expected, weights, _ = ranks(1, recomputed, None)[0]
    for results in ranks(2, compiled_whole, strategies, before, timeout=200):
        for found, state in results:
            assert_same(found, expected, atol=1e-10)
            assert_same(state, weights, atol=1e-8)


class Collects(nn.Module):
    """Adds its norm to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, norms: list[torch.Tensor]) -> torch.Tensor:
        x = self.linear(x)
        norms.append(x.square().mean())
        return x


class Collecting(nn.Module):
    """Sums up what its blocks have added, so that their graphs share tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collects() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norms = [torch.zeros(())]
        for block in self.blocks:
            x = block(x, norms)
        return torch.stack(norms).sum()


def compiled_and_not(strategy: Strategy, backend: str) -> list[tuple[float, float]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = pl.parallelize(Collecting(), strategy)
    results = []
    for called in (model, torch.compile(model, backend=backend)):
        loss = called(torch.ones(2, 8))
        loss.backward()
        results.append((loss.item(), pl.engine_of(model).grad_norm().item()))
        model.zero_grad()
    pl.release(model)
    return results


@pytest.mark.full
@pytest.mark.parametrize(("zero", "backend"), [(3, "eager"), (0, "aot_eager"), (3, "aot_eager")])
def test_blocks_that_fill_a_list_may_be_compiled_with_their_model(ranks, zero, backend) -> None:
    for plain, compiled in ranks(2, compiled_and_not, Strategy(zero=zero), backend, timeout=100):
        assert compiled == pytest.approx(plain)
