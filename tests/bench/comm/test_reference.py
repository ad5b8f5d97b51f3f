"""A collective is done here by hand for each rank, then spoilt: every spoilt element is counted."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from paceline.bench.comm import calls
from paceline.bench.comm.calls import Call, check, come_late, count_early, seconds
from paceline.bench.comm.reference import GETS_SHARD, GIVES_SHARD, count_wrong, expected, values
from paceline.core.collectives.rounds import chunk

RANKS = 3
NUMEL = 3 * 50_000
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather", "all_to_all")


def given_by(op: str, rank: int, dtype: torch.dtype) -> Tensor:
    start, stop = chunk(rank, RANKS, NUMEL) if op in GIVES_SHARD else (0, NUMEL)
    return values(rank, start, stop, dtype)


def by_hand(op: str, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a correct collective leaves on a rank."""
    each = [given_by(op, peer, dtype) for peer in range(RANKS)]
    start, stop = chunk(rank, RANKS, NUMEL)
    total = sum(each[1:], each[0]) if op in ("all_reduce", "reduce", "reduce_scatter") else each[0]
    if op == "all_to_all":
        return torch.cat([data[start:stop] for data in each])
    if op in ("all_gather", "gather"):
        return torch.cat(each)
    return total[start:stop].clone() if op in GETS_SHARD else total


def defined(op: str, rank: int) -> bool:
    return rank == 0 or op not in ("reduce", "gather")


def test_every_rank_and_every_place_has_other_data() -> None:
    data = [values(rank, 0, 200_000, torch.float32) for rank in range(8)]
    for rank, mine in enumerate(data):
        assert mine.unique().numel() > 190_000
        assert mine.min() < -0.999 < 0.999 < mine.max()
        assert all((mine != other).float().mean() > 0.999 for other in data[:rank])
        assert (mine[: 1 << 16] != mine[1 << 16 : 1 << 17]).float().mean() > 0.999


def test_data_is_the_same_wherever_it_is_asked_for() -> None:
    whole = values(1, 0, 200_000, torch.float64)
    for start, stop in ((0, 1), (65_535, 65_537), (100, 140_000), (131_072, 200_000)):
        assert torch.equal(values(1, start, stop, torch.float64), whole[start:stop])


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("op", OPS)
def test_a_right_result_has_no_wrong_element_and_each_spoilt_one_counts(op: str, rank: int) -> None:
    result = by_hand(op, rank)
    assert count_wrong(op, rank, RANKS, result, NUMEL) == 0
    size = result.numel()
    for index, value in ((0, torch.nan), (size // 2, torch.inf), (size - 1, 3.5)):
        result[index] = value
    assert count_wrong(op, rank, RANKS, result, NUMEL) == (3 if defined(op, rank) else 0)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_a_sum_that_lacks_a_rank_or_has_one_twice_is_wrong(op: str) -> None:
    start, stop = chunk(1, RANKS, NUMEL) if op in GETS_SHARD else (0, NUMEL)
    for extra in (1, -1):
        result = by_hand(op, 1) + extra * values(2, start, stop, torch.float32)
        assert count_wrong(op, 1, RANKS, result, NUMEL) > 0.999 * result.numel()


@pytest.mark.parametrize("op", ["all_gather", "all_to_all"])
def test_shards_in_each_others_places_are_wrong(op: str) -> None:
    assert count_wrong(op, 1, RANKS, by_hand(op, 1).roll(NUMEL // RANKS), NUMEL) > 0.999 * NUMEL


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_forgiven_and_more_is_not(dtype: torch.dtype) -> None:
    each = [values(peer, 0, NUMEL, dtype) for peer in range(RANKS)]
    assert count_wrong("all_reduce", 0, RANKS, (each[0] + each[1]) + each[2], NUMEL) == 0
    assert count_wrong("all_reduce", 0, RANKS, each[0] + (each[1] + each[2]), NUMEL) == 0
    precise = sum((data.double() for data in each), torch.zeros(NUMEL, dtype=torch.float64))
    assert count_wrong("all_reduce", 0, RANKS, precise.to(dtype), NUMEL) == 0
    # Five units in the last place of the largest sums.
    off = (precise + 5 * 3 * torch.finfo(dtype).eps).to(dtype)
    assert count_wrong("all_reduce", 0, RANKS, off, NUMEL) > 0.9 * NUMEL


def test_a_copy_must_be_equal_to_the_bit() -> None:
    result = by_hand("broadcast", 1)
    result[7] = torch.nextafter(result[7], torch.tensor(2.0))
    assert count_wrong("broadcast", 1, RANKS, result, NUMEL) == 1


def test_what_leaves_no_data_is_refused() -> None:
    with pytest.raises(ValueError, match="barrier: not a collective that leaves data"):
        expected("barrier", 0, 2, 8)


def test_a_collective_that_does_nothing_finds_no_earlier_result() -> None:
    buffer = torch.zeros(NUMEL)
    done = []

    def right() -> None:
        buffer.copy_(by_hand("all_reduce", 0))

    assert check(Call(buffer, buffer, right, lambda: done.append("barrier")), "all_reduce", 0, RANKS, NUMEL) == 0
    # What follows is timed, and would overflow.
    assert not buffer.any()
    assert done == ["barrier", "barrier"]
    idle = Call(buffer, buffer, lambda: None, lambda: None)
    assert check(idle, "all_reduce", 0, RANKS, NUMEL) > 0.999 * NUMEL
    source, target = torch.zeros(NUMEL), by_hand("all_to_all", 0)
    assert check(Call(source, target, lambda: None, lambda: None), "all_to_all", 0, RANKS, NUMEL) == NUMEL


def test_who_leaves_a_barrier_before_all_have_come_is_counted_each_time() -> None:
    came = [[1.0, 5.0, 8.0], [2.0, 4.0, 9.0], [1.5, 4.5, 8.5]]
    assert count_early(came, [[2.0, 5.1, 9.5], [2.1, 5.2, 9.1], [2.5, 6.0, 9.0]]) == 0
    assert count_early(came, [[1.9, 5.1, 9.5], [2.1, 5.2, 9.1], [2.5, 6.0, 9.0]]) == 1
    assert count_early(came, [[1.1, 5.1, 8.1], [2.1, 4.1, 9.1], [1.6, 4.6, 8.6]]) == 6


def test_each_rank_in_turn_comes_late_to_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LATE_SECONDS", 0.02)
    order = []
    call = Call(torch.zeros(0), torch.zeros(0), *(lambda name=name: order.append(name) for name in ("r", "b", "f")))
    for rank in range(RANKS):
        start = time.monotonic()
        came, left = come_late(call, rank, RANKS)
        moments = [start, *(moment for pair in zip(came, left, strict=True) for moment in pair)]
        assert moments == sorted(moments) and len(moments) == 1 + 2 * RANKS
        assert came[rank] - [start, *left][rank] >= 0.02 * (rank + 1)
        assert order == ["r", "f"] * RANKS
        order.clear()


def test_time_is_that_of_one_run_without_the_one_that_wakes() -> None:
    order = []
    call = Call(torch.zeros(1), torch.zeros(1), *(lambda name=name: order.append(name) for name in ("r", "b", "f")))
    assert seconds(call, 4) > 0
    assert order == ["r", "f", "b", "r", "r", "r", "r", "f"]
