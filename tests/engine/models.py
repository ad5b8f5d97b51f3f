"""Small models and helpers that several engine tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline as pl
from paceline.strategy import SYSTEMS, Strategy


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
    """A copy of a model's whole gradients, put together from the pieces of all ranks where they are sharded."""
    engine = getattr(model, "_paceline_engine", None)
    if engine is None or engine.schedule.shards == 1:
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    found: dict[str, Tensor | None] = {}
    by_name = dict(model.named_parameters())
    for index, slot in enumerate(engine.layout.slots):
        # The last element says whether any rank has a piece of it.
        flat = torch.zeros(slot.spec.numel + 1, dtype=torch.float64)
        gradient = by_name[slot.spec.name].grad
        if gradient is not None:
            (bucket,) = [bucket for bucket in engine.layout.buckets if index in bucket.slots]
            shards = engine.schedule.shards
            start, stop = engine.layout.piece(bucket, index, engine.world.rank % shards, shards)
            flat[start - slot.offset : stop - slot.offset] = gradient.double()
            flat[-1] = 1
        dist.all_reduce(flat)
        whole = (flat[:-1] / engine.schedule.replicas).as_strided(slot.spec.shape, slot.spec.stride)
        found[slot.spec.name] = whole if flat[-1] else None
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
    **{f"{name}, one copy": (replace(strategy, share_parameters=True), 2) for name, strategy in SHARDED.items()},
}
"""Every stage among one to four ranks, in groups that shard and replicate, and with one copy of the parameters."""

every_world = pytest.mark.parametrize(("strategy", "n"), WORLDS.values(), ids=WORLDS)

sharded = pytest.mark.parametrize("strategy", SHARDED.values(), ids=SHARDED)

PARALLEL = {**STAGES, "parameter server": SYSTEMS["parameter server"]}
"""The ways in which gradients come to parameters: on every rank, in pieces, or on rank 0."""

every_way = pytest.mark.parametrize("strategy", PARALLEL.values(), ids=PARALLEL)


def make(cls: type[nn.Module] = Stack, *args: Any) -> nn.Module:
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
