"""After the first step the engine takes no memory: neither where the model computes nor in the streams' threads."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import paceline as pl
from paceline.core.collectives.rounds import Traffic
from paceline.core.ops import Op
from paceline.core.strategy import Strategy
from paceline.engine.engine import Engine
from tests.engine.models import WORLDS, Stack, data, in_worlds, make, shares

LARGE = 32 * 32
"""Elements: fewer than a block's weights have, more than its activations."""

STEPS = 3


class Allocations(TorchDispatchMode):
    """Writes down which operations of the calling thread make large tensors."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        known = {t.untyped_storage().data_ptr() for t in given if torch.is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            large = torch.is_tensor(tensor) and tensor.numel() >= LARGE
            if large and tensor.untyped_storage().data_ptr() not in known:
                self.found.append(str(func))
        return out


def watch_streams(engine: Engine, found: list[str]) -> None:
    """Writes down what collectives allocate in the threads that perform them, too."""
    quietly = engine.program.executor._work

    def work(op: Op, *args: Any) -> Callable[[], Traffic]:
        perform = quietly(op, *args)

        def watched() -> Traffic:
            with Allocations(found):
                return perform()

        return watched

    engine.program.executor._work = work


def batches(step: int, micro_batches: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = (shares(part).to(dtype).chunk(micro_batches) for part in data(step, 3 * pl.init().world_size))
    return list(zip(x, y, strict=True))


def allocated(strategy: Strategy, micro_batches: int) -> list[Counter[str]]:
    """What is allocated in each step after the first."""
    dtype = torch.float32 if strategy.low else torch.float64
    model = pl.parallelize(make(Stack, 64).to(dtype), strategy)
    engine, optimizer = pl.engine_of(model), torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[str] = []
    if engine.program.collectives is not None:
        watch_streams(engine, found)
    counts = []
    for step in range(STEPS):
        found.clear()
        with Allocations(found):
            for x, y in pl.accumulate(model, batches(step, micro_batches, dtype)):
                (F.mse_loss(model(x).to(dtype), y) / micro_batches).backward()
            pl.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            engine.program.executor.settle()
        counts.append(Counter(found))
    pl.release(model)
    return counts[1:]


@functools.cache
def by_autograd(micro_batches: int, low: bool) -> Counter[str]:
    """What a step without paceline allocates: gradients."""
    model, found = make(Stack, 64).to(torch.bfloat16 if low else torch.float64), []
    x, y = data(0, 1)
    with Allocations(found):
        for _ in range(micro_batches):
            F.mse_loss(model(x.bfloat16() if low else x).to(y.dtype), y).backward()
    return Counter(found)


KINDS: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({}, 3),
    ({"precision": "bfloat16"}, 1),
    ({"precision": "bfloat16"}, 3),
    ({"accumulation": "each"}, 3),
    ({"accumulation": "defer"}, 3),
    ({"accumulation": "hold"}, 3),
    ({"recompute": "unit"}, 1),
]
"""Settings, and micro-batches of a step."""


def of_every_kind(strategy: Strategy, micro_batches: int) -> list[list[Counter[str]]]:
    return [allocated(replace(strategy, **settings), micro_batches) for settings in of_stage(strategy, micro_batches)]


def of_stage(strategy: Strategy, micro_batches: int) -> list[dict[str, Any]]:
    """Those settings of KINDS that go together with a strategy."""
    kinds = [settings for settings, number in KINDS if number == micro_batches]
    return [settings for settings in kinds if settings.get("accumulation") != "hold" or strategy.gathers]


@in_worlds(WORLDS, micro_batches=[1, 3])
def test_the_engine_allocates_nothing_after_the_first_step(ranks, strategy, n, micro_batches) -> None:
    for result in ranks(n, of_every_kind, strategy, micro_batches):
        for settings, counts in zip(of_stage(strategy, micro_batches), result, strict=True):
            expected = by_autograd(micro_batches, settings.get("precision") == "bfloat16")
            assert counts == [expected] * (STEPS - 1), f"{settings}, {micro_batches} micro-batches"
