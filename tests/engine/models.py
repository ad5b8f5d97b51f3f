"""Small models and helpers that several engine tests share."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from itertools import cycle, product
from typing import Any, TypeVar
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import SYSTEMS, Strategy
from tests.quick import fewest, named_values

Test = TypeVar("Test", bound=Callable[..., None])


class Stack(nn.Module):
    """An embedding-like input layer, repeated blocks and a head."""

    def __init__(self, width: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def data(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """fp64 inputs (count, 4) and targets (count, 2)."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 4, generator=generator, dtype=torch.float64),
        torch.randn(count, 2, generator=generator, dtype=torch.float64),
    )


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's weights and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of a model's whole gradients, put together from the shards of all ranks where they are sharded."""
    engine = getattr(model, "_paceline_engine", None)
    if engine is None or engine.schedule.shards == 1:
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    slots, shards = engine.layout.slots, engine.schedule.shards
    by_name = dict(model.named_parameters())
    # One message: each parameter's elements, then whether any rank has a shard of it.
    flat = torch.zeros(sum(slot.spec.numel + 1 for slot in slots), dtype=torch.float64)
    places = dict(zip(range(len(slots)), flat.split([slot.spec.numel + 1 for slot in slots]), strict=True))
    for index, slot in enumerate(slots):
        gradient = by_name[slot.spec.name].grad
        if gradient is not None:
            (bucket,) = [bucket for bucket in engine.layout.buckets if index in bucket.slots]
            start, stop = engine.layout.shard_of(bucket, index, engine.world.rank % shards, shards)
            places[index][start - slot.offset : stop - slot.offset] = gradient.as_subclass(Tensor).double()
            places[index][-1] = 1
    dist.all_reduce(flat)
    found: dict[str, Tensor | None] = {}
    for index, slot in enumerate(slots):
        whole = (places[index][:-1] / engine.schedule.replicas).clone()
        found[slot.spec.name] = whole.as_strided(slot.spec.shape, slot.spec.stride) if places[index][-1] else None
    return {name: found[name] for name in by_name}


def assert_same(results: dict[str, Any], expected: dict[str, Any], atol: float = 1e-12) -> None:
    """Compares two dictionaries of tensors or None."""
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert results[name] is None, name
        else:
            torch.testing.assert_close(results[name], value, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


STAGES = {f"zero {stage}": Strategy(zero=stage, bucket_mb=1e-4) for stage in (0, 1, 2, 3)}
"""What is sharded, with several buckets even in the smallest model."""

stages = pytest.mark.parametrize("strategy", STAGES.values(), ids=STAGES)

SHARDED = {name: strategy for name, strategy in STAGES.items() if strategy.stage}
HYBRID = {f"{name}, 2 x 2": replace(strategy, shard=2) for name, strategy in SHARDED.items()}

WORLDS = {
    **{f"{name}, N={n}": (strategy, n) for name, strategy in STAGES.items() for n in (1, 2, 3, 4)},
    **{name: (strategy, 4) for name, strategy in HYBRID.items()},
    **{
        f"{name}, shared parameters": (replace(strategy, share_parameters=True), 2)
        for name, strategy in SHARDED.items()
    },
}
"""Every stage among one to four ranks, in groups that shard and replicate, and with shared parameters."""

NEAREST = {"zero 3, N=1", "zero 1, N=2", "zero 3, N=2", "zero 2, shared parameters", "zero 0, N=3"}
"""Those of each kind that a plain `pytest` runs; `pytest -m other_worlds` runs the rest."""

NEAREST_GROUPS = NEAREST - {"zero 3, N=2"} | {"zero 3, 2 x 2"}
"""Those for tests of what groups may get wrong: four ranks, as two that shard all and as two groups."""


def in_worlds(
    worlds: dict[str, tuple[Strategy, int]],
    nearest: Container[str] = NEAREST,
    **axes: Mapping[str, object] | Iterable[object],
) -> Callable[[Test], Test]:
    """Runs a test with the `strategy` and the `n` ranks of each world, those of as many ranks after each other.

    Where there are `axes` too, each of their combinations does. Each meets every stage, and every number of ranks or
    kind of groups; not all of both at once, of which schedules are checked in tests/core, but other ones in each test.
    A plain `pytest` takes the combinations by turns, one in each of the nearest worlds.
    """
    combinations = product(*(named_values(axis).items() for axis in axes.values()))
    by_label = {"-".join(name for name, _ in each): [value for _, value in each] for each in combinations}
    by_parts = {tuple(name.partition(", ")[::2]): name for name in worlds}
    order = sorted(by_parts, key=lambda parts: worlds[by_parts[parts]][1])
    near = [parts for parts in order if by_parts[parts] in nearest or by_parts[parts] not in WORLDS]
    quick = [(*parts, label) for parts, label in zip(near, cycle(by_label), strict=False)]
    every = [(*parts, label) for parts in order for label in by_label]

    def case(stage: str, ranks: str, label: str) -> pytest.param:
        name = by_parts[stage, ranks]
        mark = pytest.mark.full if (stage, ranks) in near else pytest.mark.other_worlds
        return pytest.param(
            *worlds[name],
            *by_label[label],
            id="-".join(filter(None, (name, label))),
            marks=() if (stage, ranks, label) in quick else mark,
        )

    def run(test: Test) -> Test:
        turn = crc32(test.__name__.encode()) % len(every)
        chosen = fewest(every[turn:] + every[:turn], lambda each: ((0, each[0], each[2]), (1, each[1], each[2])), quick)
        cases = [case(*each) for each in sorted(chosen, key=lambda each: order.index(each[:2]))]
        return pytest.mark.parametrize(("strategy", "n", *axes), cases)(test)

    return run


every_world = in_worlds(WORLDS)

every_group = in_worlds(WORLDS, NEAREST_GROUPS)
"""As `every_world`, where a plain `pytest` also takes groups."""

SEVERAL = {name: (strategy, n) for name, (strategy, n) in WORLDS.items() if n > 1}

several_ranks = in_worlds(SEVERAL)
"""As `every_world`, for what one rank cannot get wrong."""

several_groups = in_worlds(SEVERAL, NEAREST_GROUPS)
"""As `every_group`, for what one rank cannot get wrong."""

sharded = pytest.mark.parametrize("strategy", SHARDED.values(), ids=SHARDED)

PARALLEL = {**STAGES, "parameter server": SYSTEMS["parameter server"]}
"""The ways in which gradients come to parameters: on every rank, in shards, or on rank 0."""

every_way = pytest.mark.parametrize("strategy", PARALLEL.values(), ids=PARALLEL)


def make(cls: Callable[..., nn.Module] = Stack, *args: Any) -> nn.Module:
    """A model in fp64 with the same weights wherever it is made."""
    torch.manual_seed(0)
    return cls(*args).double()


def shares(x: Tensor) -> Tensor:
    """This rank's rows of a batch."""
    world = pl.init()
    return x[world.rank :: world.world_size]


def fail_in_backward(gradient: Tensor) -> None:
    """A tensor hook that raises."""
    raise ValueError("in the middle of backward")


class Fragile(Stack):
    """Raises in backward behind one of its blocks, when told which."""

    fails_at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for index, block in enumerate(self.blocks):
            x = x + block(x)
            if index == self.fails_at:
                x.register_hook(fail_in_backward)
        return self.head(x)


# What follows runs alike on a plain model, which is the reference, and on a parallel one.


def rows_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The rows of a batch that a model is trained on here: all for a plain one, this rank's for a parallel one."""
    return shares(batch) if hasattr(model, "_paceline_engine") else batch


def rows(model: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """`rows_of` twelve inputs and targets, which 1 to 4 ranks share evenly."""
    x, y = data(seed, 12)
    return rows_of(model, x), rows_of(model, y)


def loss_on(model: nn.Module, seed: int) -> Tensor:
    """Mean squared error of a model on its rows of a batch."""
    x, y = rows(model, seed)
    return F.mse_loss(model(x), y)


def train(model: nn.Module, steps: int = 3) -> list[dict[str, Tensor]]:
    """A plain training loop's weights after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        loss_on(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [snapshot(model)]


def in_parallel(strategy: Strategy, cls: Callable[[], nn.Module], run: Callable[..., Any], *args: Any) -> Any:
    """What `run(model, *args)` returns for a parallel model; each rank calls this."""
    model = pl.parallelize(make(cls), strategy)
    result = run(model, *args)
    pl.release(model)
    return result


def assert_all_same(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compares dictionaries of tensors or None, one after another."""
    for found, wanted in zip(results, expected, strict=True):
        assert_same(found, wanted)
