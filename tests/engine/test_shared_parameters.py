"""Ranks of one host that compute with one copy of the parameters (`share_parameters`)."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from paceline.buffers.whole_parameters import WholeParameters
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from tests.engine.models import Stack, assert_same, data, make
from tests.ranks import RankError

PLAIN = Strategy(zero=1)
SHARED = Strategy(zero=1, share_parameters=True)
LOW = Strategy(zero=2, share_parameters=True, precision="bfloat16")


def begin(strategy: Strategy) -> tuple[Any, torch.optim.Optimizer]:
    pl.init()
    model = pl.parallelize(make().float(), strategy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    world = pl.init()
    x, y = (part[world.rank :: world.world_size].float() for part in data(number, 12))
    F.mse_loss(model(x).float(), y.float()).backward()
    optimizer.step()
    optimizer.zero_grad()


def edited(strategy: Strategy) -> dict[str, torch.Tensor]:
    """Trains, halves every parameter in place on every rank, and trains on."""
    model, optimizer = begin(strategy)
    step(model, optimizer, 0)
    with pl.full_parameters(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    step(model, optimizer, 1)
    with pl.full_parameters(model):
        return {name: p.detach().float().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("n", [2, 3])
def test_an_edit_by_every_rank_happens_once(ranks, n) -> None:
    expected = ranks(n, edited, PLAIN)[0]
    for state in ranks(n, edited, SHARED):
        assert_same(state, expected, atol=0)


def test_and_so_it_does_in_low_precision(ranks) -> None:
    expected = ranks(2, edited, Strategy(zero=2, precision="bfloat16"))[0]
    for state in ranks(2, edited, LOW):
        assert_same(state, expected, atol=0)


def edited_before_an_exception(strategy: Strategy) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Every rank halves all parameters and raises; the last one is late to write its part of them."""
    model, optimizer = begin(strategy)
    x = data(1, 12)[0].float()
    step(model, optimizer, 0)
    keep = WholeParameters.keep

    def late(whole: WholeParameters) -> None:
        time.sleep(0.3 if pl.init().rank else 0)
        keep(whole)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyError), torch.no_grad():
        patched.setattr(WholeParameters, "keep", late)
        with pl.full_parameters(model):
            for parameter in model.parameters():
                parameter.mul_(0.5)
            raise KeyError
    with torch.no_grad():
        answer = model(x).clone()
    step(model, optimizer, 1)
    with pl.full_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}, answer


def test_nobody_reads_what_another_rank_has_yet_to_write_after_an_exception(ranks) -> None:
    expected = ranks(2, edited_before_an_exception, PLAIN)[0]
    for state, answer in ranks(2, edited_before_an_exception, SHARED):
        assert torch.equal(answer, expected[1])
        assert_same(state, expected[0], atol=0)


def read_late(strategy: Strategy) -> tuple[bool, list[float]]:
    """Rank 0 computes with the parameters for a while after its backward; the others are waiting to update them."""
    world = pl.init()
    model, optimizer = begin(strategy)
    x, y = (part[world.rank :: world.world_size].float() for part in data(0, 12))
    loss = F.mse_loss(model(x), y)
    loss.backward()
    same = True
    if world.rank == 0:
        with torch.no_grad():
            before = model(x)
            for _ in range(20):
                time.sleep(0.02)
                same &= torch.equal(model(x), before)
    optimizer.step()
    with torch.no_grad():
        after = model(x)
    time.sleep(0.05 * world.rank)
    with torch.no_grad():
        same &= torch.equal(model(x), after)
    return same, [float(v) for v in after.flatten()[:3]]


def test_nobody_updates_what_another_rank_still_reads_nor_reads_what_is_half_updated(ranks) -> None:
    for result, expected in zip(ranks(3, read_late, SHARED), ranks(3, read_late, PLAIN), strict=True):
        assert result == expected and result[0]


def saved_by_one() -> bool:
    model, optimizer = begin(SHARED)
    step(model, optimizer, 0)
    saved = {k: v.clone() for k, v in model.state_dict().items()} if pl.init().rank == 0 else {}
    step(model, optimizer, 1)
    model.load_state_dict(model.state_dict())
    return not saved or any(not torch.equal(saved[k], v) for k, v in model.state_dict().items())


def test_one_rank_alone_may_take_the_state(ranks) -> None:
    assert ranks(2, saved_by_one) == [True, True]


def shared_bytes() -> int:
    """Shared memory that this process uses, divided by the number of processes that use it."""
    total, ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split()[0]:
                ours = "memfd:paceline" in line
            elif ours and line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total


def used(strategy: Strategy) -> int:
    gc.collect()  # engines of earlier tests
    pl.init()
    before = shared_bytes()
    model = pl.parallelize(torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(4))), strategy)
    pl.barrier()
    size = shared_bytes() - before
    pl.barrier()
    del model
    return size


def test_a_host_holds_one_copy(ranks) -> None:
    size, besides = 4 * 1500 * 1501 * 4, 3 << 20  # a megabyte a rank to send rank 0's weights through
    assert 2 * size <= sum(ranks(2, used, PLAIN)) < 2 * size + besides
    assert size <= sum(ranks(2, used, SHARED)) < size + besides


def rearranged() -> tuple[int, int]:
    """Bytes shared after a step, in which the order of the forward pass became known, and those that are of use."""
    gc.collect()
    pl.init()
    before = shared_bytes()
    model = pl.parallelize(make(Stack, 1000).float(), PLAIN)
    step(model, torch.optim.SGD(model.parameters(), lr=1e-2), 0)
    pl.barrier()
    size = shared_bytes() - before
    pl.barrier()
    layout = pl.engine_of(model).layout
    return size, sum(flat.numel * (flat.itemsize + flat.gradient_itemsize) for flat in layout.flats)


def test_memory_of_a_layout_that_another_took_the_place_of_is_given_back(ranks) -> None:
    sizes, needed = zip(*ranks(2, rearranged), strict=True)
    assert sum(needed) <= sum(sizes) < sum(needed) + (3 << 20)


def refused(strategy: Strategy) -> None:
    pl.init()
    pl.parallelize(make().float(), strategy)


def test_ranks_that_cannot_share_memory_are_told_what_to_set(ranks) -> None:
    with pytest.raises(RankError, match=r"share_parameters: the ranks of a shard group .* connected by tcp"):
        ranks(2, refused, SHARED, transport="tcp")


def test_a_stage_without_shards_refuses_it() -> None:
    with pytest.raises(UserError, match="set zero to 1, 2 or 3"):
        Strategy(zero=0, share_parameters=True)
