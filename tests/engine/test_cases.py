"""Training loops that engines are known to get wrong."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import paceline as pl
from paceline.strategy import SYSTEMS, Strategy
from tests.engine.models import (
    Stack,
    assert_same,
    data,
    gradients,
    make,
    shares,
    snapshot,
    stages,
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
        for step in range(5):
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
    for step in range(5):
        x, y = (shares(part).float() for part in data(step, 5 * world.world_size))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    pl.release(model)
    return state


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_packing_changes_no_bit_in_float32(ranks, transport) -> None:
    expected = ranks(3, in_float32, 25.0, "flat", transport=transport)[0]
    for bucket_mb, packing in ((1e-4, "bucket"), (3e-4, "bucket"), (25.0, "bucket"), (25.0, "parameter")):
        for state in ranks(3, in_float32, bucket_mb, packing, transport=transport):
            assert_same(state, expected, atol=0)


# ---- weighting by tokens


def weighted(strategy: Strategy, counts: tuple[int, ...]) -> dict:
    world = pl.init()
    model = make()
    engine = pl.engine_of(pl.parallelize(model, replace(strategy, gradients="sum")))
    x, y = data(0, sum(counts))
    first = sum(counts[: world.rank])
    x, y = (part[first : first + counts[world.rank]] for part in (x, y))
    loss = (model(x) - y).square().sum()
    engine.count(len(x), loss)
    loss.backward()
    tokens, _ = engine.counts()
    scaled = {name: None if g is None else g / max(tokens.item(), 1) for name, g in gradients(model).items()}
    pl.release(model)
    return scaled


@stages
@pytest.mark.parametrize("counts", [(1, 1000), (0, 7), (3, 0, 4)])
def test_uneven_token_counts_give_the_mean_over_all_tokens(ranks, strategy, counts) -> None:
    model = make()
    x, y = data(0, sum(counts))
    ((model(x) - y).square().sum() / sum(counts)).backward()
    for result in ranks(len(counts), weighted, strategy, counts):
        assert_same(result, gradients(model))


@stages
def test_no_tokens_anywhere_gives_zero_gradients_not_nan(ranks, strategy) -> None:
    for result in ranks(2, weighted, strategy, (0, 0)):
        assert all(torch.count_nonzero(g) == 0 for g in result.values() if g is not None)


def uneven(strategy: Strategy, counts: list[tuple[int, ...]]) -> dict:
    world = pl.init()
    model = pl.parallelize(make(), replace(strategy, gradients="sum"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, numbers in enumerate(counts):
        x, y = data(step, sum(numbers))
        first = sum(numbers[: world.rank])
        mine = [(x[i : i + 1], y[i : i + 1]) for i in range(first, first + numbers[world.rank])]
        for xs, ys in pl.accumulate(model, mine, uneven=True):
            ((model(xs) - ys).square().sum() / sum(numbers)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@stages
def test_ranks_with_more_or_fewer_micro_batches_or_none_wait_for_nobody(ranks, strategy) -> None:
    counts = [(5, 3), (0, 2), (3, 0), (1, 1)]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, numbers in enumerate(counts):
        x, y = data(step, sum(numbers))
        ((model(x) - y).square().sum() / sum(numbers)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in ranks(2, uneven, strategy, counts):
        assert_same(state, snapshot(model))


# ---- recomputation


class Checkpointed(Stack):
    """Recomputes its blocks; one parameter is used in two of them."""

    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        if shared:
            self.blocks[2] = self.blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def recomputed(strategy: Strategy, reentrant: bool, shared: bool) -> tuple[dict, bool]:
    model = pl.parallelize(make(Checkpointed, reentrant, shared), strategy)
    engine = pl.engine_of(model)
    as_planned = True
    for step in range(3):
        engine.drain_events()
        model.zero_grad()
        x, y = (shares(part) for part in data(step, 8))
        F.mse_loss(model(x), y).backward()
    executed = [event.target for event in engine.drain_events() if event.stream == "reduce"]
    as_planned = executed == [op.target for op in engine.schedule.step(1) if op.stream == "reduce"]
    found = gradients(model)
    pl.release(model)
    return found, as_planned


@stages
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_both_kinds_even_of_a_shared_block(ranks, strategy, reentrant, shared) -> None:
    model = make(Checkpointed, reentrant, shared)
    x, y = data(2, 8)
    F.mse_loss(model(x), y).backward()
    for result, as_planned in ranks(2, recomputed, strategy, reentrant, shared):
        assert_same(result, gradients(model))
        assert as_planned, "from the second step on, late units are scheduled after backward"


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


def odd(strategy: Strategy) -> tuple[dict, dict, list]:
    model = make(Odd)
    shapes = [(p.shape, p.stride()) for p in model.parameters()]
    pl.parallelize(model, strategy)
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(shares(x)).mean().backward()
    found = gradients(model)
    optimizer.step()
    with pl.full_parameters(model):
        kept = [(p.shape, p.stride()) for p in model.parameters()] == shapes
    aligned = all(p.grad is None or p.grad.stride() == p.stride() for p in model.parameters())
    state = snapshot(model)
    pl.release(model)
    return found, state, [kept, aligned]


@stages
def test_odd_parameters_keep_shape_and_strides(ranks, strategy) -> None:
    model = make(Odd)
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model(x).mean().backward()
    expected = gradients(model)
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    if strategy.stage:
        expected["empty"] = None  # no rank has a piece of it
    for found, state, checks in ranks(2, odd, strategy):
        assert_same(found, expected)
        assert_same(state, snapshot(model))
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
    own = snapshot(model)
    pl.broadcast_buffers(model)
    shared = snapshot(model)
    pl.release(model)
    return first, own, shared


def test_buffers_are_rank_0s_at_the_start_then_each_ranks_own_until_asked_for(ranks) -> None:
    (first0, own0, shared0), (first1, own1, shared1) = ranks(2, buffers)
    assert_same(first1, first0, atol=0)
    assert not torch.equal(own1["norm.running_mean"], own0["norm.running_mean"])
    assert_same(shared1, shared0, atol=0)
    assert torch.equal(shared1["norm.running_mean"], own0["norm.running_mean"])
    assert shared1["norm.num_batches_tracked"] == 1
