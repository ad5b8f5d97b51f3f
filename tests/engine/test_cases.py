"""Training loops that engines are known to get wrong."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.core.strategy import SYSTEMS, Strategy
from paceline.tensors.gradient_shard import GradientShard
from tests.engine.models import (
    assert_all_same,
    assert_same,
    data,
    every_world,
    gradients,
    make,
    rows,
    rows_of,
    shares,
    snapshot,
)

# ---- gradient descent by hand


def by_hand() -> tuple[list[float], list[float]]:
    world = pl.init()
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.773, 0.321]]))
        model.bias.fill_(0.067)
    pl.parallelize(model, Strategy(gradients="sum"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = [((6.0, 2.0), 15.0), ((5.0, 2.0), 12.0)][world.rank]
    loss = (model(torch.tensor([x], dtype=torch.float64)) - y).square().sum()
    loss.backward()
    slopes = [*model.weight.grad.flatten().tolist(), model.bias.grad.item()] if model.weight.grad is not None else []
    optimizer.step()
    result = [*model.weight.flatten().tolist(), model.bias.item()]
    pl.release(model)
    return slopes, result


def test_gradient_descent_by_hand(ranks) -> None:
    for slopes, weights in ranks(2, by_hand):
        # One item a rank, both at the first weights, gradients summed: what accumulation by hand gives.
        assert weights == pytest.approx([0.9631, 0.3893, 0.1012], abs=5e-5)
        assert slopes == pytest.approx([-190.096, -68.316, -34.158], abs=0.02)


# ---- equal to torch's DDP


def beside_ddp(strategy: Strategy) -> tuple[dict, dict]:
    world = pl.init()
    ours, theirs = make(), make()
    pl.parallelize(ours, strategy)
    theirs = DistributedDataParallel(theirs, gradient_as_bucket_view=True)
    states = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            x, y = (shares(part) for part in data(step, 4 * world.world_size))
            with model.no_sync():
                (F.mse_loss(model(x[:2]), y[:2]) / 2).backward()
            (F.mse_loss(model(x[2:]), y[2:]) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(snapshot(getattr(model, "module", model)))
    pl.release(ours)
    return states[0], states[1]


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_equal_to_ddp(ranks, system) -> None:
    for ours, theirs in ranks(3, beside_ddp, SYSTEMS[system]):
        assert_same(ours, theirs)


# ---- bucket size changes nothing, to the bit


def in_float32(bucket_mb: float, packing: str) -> dict:
    world = pl.init()
    model = make().float()
    pl.parallelize(model, Strategy(bucket_mb=bucket_mb, packing=packing))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x, y = (shares(part).float() for part in data(step, 5 * world.world_size))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    pl.release(model)
    return state


@pytest.mark.full
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_packing_changes_no_bit_in_float32(ranks, transport) -> None:
    expected = ranks(3, in_float32, 25.0, "flat", transport=transport)[0]
    for bucket_mb, packing in ((1e-4, "bucket"), (3e-4, "bucket"), (25.0, "bucket"), (25.0, "parameter")):
        for state in ranks(3, in_float32, bucket_mb, packing, transport=transport):
            assert_same(state, expected, atol=0)


def in_buckets(strategy: Strategy, sizes: tuple[float, ...]) -> list[tuple[int, dict]]:
    found = []
    for bucket_mb in sizes:
        model = pl.parallelize(make().float(), replace(strategy, bucket_mb=bucket_mb))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            x, y = (part.float() for part in rows(model, step))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((len(pl.engine_of(model).layout.buckets), snapshot(model)))
        pl.release(model)
    return found


@every_world
def test_where_buckets_are_cut_changes_no_bit_in_float32(ranks, strategy, n) -> None:
    results = ranks(n, in_buckets, strategy, (1e-4, 3e-4, 25.0))
    (most, expected), _, (fewest, _) = results[0]
    # A unit that is gathered has a bucket of its own, whatever its size.
    assert fewest == most if strategy.gathers else fewest == 1 < most
    for found in results:
        for _, state in found:
            assert_same(state, expected, atol=0)


# ---- shapes


class Odd(nn.Module):
    """A scalar, an empty, a one-element and a channels-last parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.single = nn.Parameter(torch.ones(1))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.arange(6.0).view(2, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).sum((1, 2, 3)) * self.scalar + self.single + self.empty.sum()
        return y * self.transposed[2, 1]


def odd(model: nn.Module) -> list[dict]:
    x = torch.randn(12, 3, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        model(rows_of(model, x)).mean().backward()
        found.append(gradients(model))
        optimizer.step()
        found.append(snapshot(model))
    return found


def odd_in_parallel(strategy: Strategy) -> tuple[list[dict], list[bool]]:
    model = make(Odd)

    def shapes() -> list[tuple[object, ...]]:
        return [(p.shape, p.stride(), p.is_contiguous()) for p in model.parameters()]

    told = [shapes()]
    pl.parallelize(model, strategy)
    told.append(shapes())
    found = odd(model)
    told.append(shapes())
    with pl.full_parameters(model):
        told.append(shapes())
    kept = all(each == told[0] for each in told)
    sharded = pl.engine_of(model).schedule.shards > 1
    aligned = all(
        p.grad is None or (isinstance(p.grad, GradientShard) if sharded else p.grad.stride() == p.stride())
        for p in model.parameters()
    )
    pl.release(model)
    return found, [kept, aligned]


@every_world
def test_odd_parameters_keep_shape_and_strides(ranks, strategy, n) -> None:
    expected = odd(make(Odd))
    for found, checks in ranks(n, odd_in_parallel, strategy):
        assert_all_same(found, expected)
        assert checks == [True, True]


def copied() -> bool:
    model = pl.parallelize(make())
    average = copy.deepcopy(model)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(average(x), y).backward()  # its own gradients, which nobody reduces
    alone = gradients(average)
    F.mse_loss(model(x), y).backward()
    plain = make()
    F.mse_loss(plain(x), y).backward()
    assert_same(alone, gradients(plain))
    assert not pl.engine_of(model).drain_events()[0].step
    pl.release(model)
    return average.inner.weight.data_ptr() != model.inner.weight.data_ptr()


def test_a_deep_copy_of_a_parallel_model_is_a_plain_model(ranks) -> None:
    assert ranks(2, copied) == [True, True]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


def buffers() -> tuple[dict, dict, dict]:
    world = pl.init()
    model = Normed()
    model.norm.running_mean.fill_(world.rank)  # type: ignore[operator]
    pl.parallelize(model)
    first = snapshot(model)
    model(torch.full((5, 4), float(world.rank)) + torch.arange(5)[:, None]).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    shared = snapshot(model)
    pl.release(model)
    return first, own, shared


def test_buffers_are_rank_0s_at_the_start_and_after_every_step(ranks) -> None:
    (first0, own0, shared0), (first1, own1, shared1) = ranks(2, buffers)
    assert_same(first1, first0, atol=0)
    assert not torch.equal(own1["norm.running_mean"], own0["norm.running_mean"])
    assert_same(shared1, shared0, atol=0)
    assert torch.equal(shared1["norm.running_mean"], own0["norm.running_mean"])
    assert shared1["norm.num_batches_tracked"] == 1


class Cached(nn.Module):
    """Keeps what is of another shape on each rank, beside what is alike and never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("fixed", torch.arange(3.0))
        self.register_buffer("cache", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = x.detach().flatten()
        return self.inner(x) * self.fixed


def cached() -> tuple[list[int], list[str], list[str]]:
    world = pl.init()
    model = pl.parallelize(Cached())
    engine = pl.engine_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sizes = []
    for step in range(3):
        rows = 2 + (world.rank * step)
        model(torch.ones(rows, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(model.cache.numel() - 4 * rows)
    sent = sorted(engine.program.module_buffers.sent)
    events = [event.target for event in engine.drain_events() if event.kind == "broadcast"]
    pl.release(model)
    return sizes, sent, events


def test_buffers_of_other_shapes_on_each_rank_stay_and_unchanged_ones_are_not_sent(ranks) -> None:
    # In the first step all have one shape, so they are sent then: after backward and after the update.
    assert ranks(2, cached) == [([0, 0, 0], [], ["the model's buffers"] * 2)] * 2
