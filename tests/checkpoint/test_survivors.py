"""Ranks that outlive another one hand on what they hold, and nothing else is needed where it is replicated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paceline as pl
from paceline.checkpoint.folder import is_complete
from paceline.checkpoint.survivors import choose_writers, commit_held, is_writable, write_held
from paceline.core.build_layout import build_layout
from paceline.core.placement import Placement
from paceline.core.strategy import SYSTEMS, Strategy
from tests.checkpoint.training import built, everything, optimizer_of, steps
from tests.engine.models import assert_same
from tests.quick import full

HYBRID = Strategy(zero=2, shard=2, bucket_mb=1e-4)


def placement(strategy: Strategy, n: int) -> Placement:
    return Placement(build_layout([], [], strategy, n), strategy, n, 0, ())


@pytest.mark.parametrize(
    ("strategy", "n", "done", "expected"),
    [
        (Strategy(), 3, {0: 7, 2: 7}, (7, [0, 2])),
        # Rank 2 has updated its weights, rank 0 had not heard of all gradients when rank 1 was lost.
        (Strategy(), 3, {0: 6, 2: 7}, (7, [2])),
        (Strategy(zero=1), 2, {0: 7}, None),
        (Strategy(zero=3), 3, {0: 7, 1: 7}, None),
        # Ranks 0 and 2 hold the same shard, and 1 and 3.
        (HYBRID, 4, {0: 7, 1: 7, 2: 7}, (7, [0, 1, 2])),
        (HYBRID, 4, {0: 7, 3: 7}, (7, [0, 3])),
        (HYBRID, 4, {0: 7, 2: 7}, None),
        (HYBRID, 4, {0: 7, 1: 6, 2: 6}, (6, [1, 2])),
        (HYBRID, 4, {0: 7, 1: 6, 2: 7}, None),
        (SYSTEMS["parameter server"], 3, {0: 7, 1: 7}, (7, [0, 1])),
        (SYSTEMS["parameter server"], 3, {1: 7, 2: 7}, None),
    ],
)
def test_whoever_holds_all_elements_of_the_latest_step_writes(
    strategy: Strategy, n: int, done: dict[int, int], expected: tuple[int, list[int]] | None
) -> None:
    assert choose_writers(placement(strategy, n), done) == expected


@given(st.sampled_from([1, 2, 4]), st.dictionaries(st.integers(0, 7), st.integers(3, 4), max_size=8))
def test_writers_hold_every_shard_of_one_step_and_it_is_the_latest_such(shards: int, done: dict[int, int]) -> None:
    strategy = Strategy() if shards == 1 else Strategy(zero=2, shard=shards)
    groups = [set(range(index, 8, shards)) for index in range(shards)]

    def whole(step: int) -> bool:
        return all(any(done.get(rank) == step for rank in group) for group in groups)

    expected = next((step for step in (4, 3) if whole(step)), None)
    chosen = choose_writers(placement(strategy, 8), done)
    assert (None if chosen is None else chosen[0]) == expected
    if chosen is not None:
        assert chosen[1] == sorted(rank for rank, step in done.items() if step == chosen[0])


def prepared(strategy: Strategy, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    whole = built(dtype=dtype)
    if strategy.zero:
        # Shards of what lies in memory in another order are put together by all ranks.
        whole.conv.to(memory_format=torch.contiguous_format)
    model = pl.parallelize(whole, strategy)
    optimizer = optimizer_of(model)
    return model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def without(folder: Path, strategy: Strategy, dtype: torch.dtype, lost: int) -> dict[str, Tensor]:
    """Three steps after which one rank is lost, as far as others know; returns three more of all."""
    world = pl.init()
    model, optimizer, scheduler = prepared(strategy, dtype)
    steps(model, optimizer, scheduler, 0, 3)
    engine = pl.engine_of(model)
    assert is_writable(engine)
    done = {rank: 3 for rank in range(world.world_size) if rank != lost}
    chosen = choose_writers(engine.schedule, done)
    assert chosen == (3, sorted(done))
    folder.mkdir(exist_ok=True)
    if world.rank in done:
        write_held(folder, engine, optimizer, {"best": 1.5}, chosen[1])
    pl.barrier()
    if world.rank == min(done):
        commit_held(folder, engine, *chosen)
    pl.barrier()
    assert is_complete(folder)
    return everything(model, steps(model, optimizer, scheduler, 3, 6))


def handed_on(folder: Path, strategy: Strategy, dtype: torch.dtype) -> dict[str, Tensor]:
    model, optimizer, scheduler = prepared(strategy, dtype)
    steps(model, optimizer, scheduler, 7, 8)
    loaded = pl.load(folder, model, optimizer)
    assert (loaded.step, loaded.extra) == (3, {"best": 1.5})
    return everything(model, steps(model, optimizer, scheduler, 3, 6))


@pytest.mark.parametrize(
    ("strategy", "n", "lost", "dtype"),
    [
        (Strategy(bucket_mb=1e-4), 3, 0, torch.float64),
        full(Strategy(bucket_mb=1e-4), 2, 1, torch.float64),
        full(Strategy(precision="bfloat16"), 2, 0, torch.float32),
        full(HYBRID, 4, 0, torch.float64),
        full(HYBRID, 4, 3, torch.float64),
        full(Strategy(zero=3, shard=2, bucket_mb=1e-4), 4, 1, torch.float64),
        full(SYSTEMS["parameter server"], 3, 2, torch.float64),
    ],
)
def test_what_survivors_hold_is_all_of_it(
    ranks, tmp_path: Path, strategy: Strategy, n: int, lost: int, dtype: torch.dtype
) -> None:
    expected = ranks(n, without, tmp_path / "held", strategy, dtype, lost)
    for found, before in zip(ranks(n, handed_on, tmp_path / "held", strategy, dtype), expected, strict=True):
        assert_same(found, before, atol=0)


def strided(strategy: Strategy) -> bool:
    return is_writable(pl.engine_of(pl.parallelize(built(), strategy)))


def test_what_needs_the_lost_rank_to_be_put_together_is_not_written(ranks) -> None:
    assert ranks(2, strided, Strategy(zero=1)) == [False, False]
    assert ranks(2, strided, Strategy()) == [True, True]
