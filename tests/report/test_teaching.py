"""The step of two ranks in numbers: the textbook's, and the engine's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from paceline.report.small_model import START
from paceline.report.teaching import WAYS, Frame, frames
from tests.engine.test_cases import by_hand

BY_HAND = (0.9631, 0.3893, 0.1012)
SUMS = (-190.096, -68.316, -34.158)


def done(name: str) -> list[Frame]:
    return frames(*WAYS[name])


@pytest.mark.parametrize("name", WAYS)
def test_whichever_way_it_is_done_the_weights_are_those_worked_by_hand(name: str) -> None:
    last = done(name)[-1]
    for index, expected in enumerate(BY_HAND):
        held = [rank["parameters"][index] for rank in last.held if rank["parameters"][index] is not None]
        assert held == [pytest.approx(expected, abs=5e-5)] * (1 if name.startswith("zero 3") else 2)


def test_on_the_way_are_the_numbers_worked_by_hand() -> None:
    told = " ".join(frame.told for frame in done("zero 0, a ring"))
    for number in ("y = 5.347", "loss 93.18", "y = 4.574", "loss 55.1455", "w1 -115.836, w2 -38.612, b -19.306"):
        assert number in told
    reduced = done("zero 0, a ring")[-2]
    assert all(rank["gradients"] == pytest.approx(SUMS) for rank in reduced.held)


def test_the_engine_does_the_same(ranks: Any) -> None:
    last = done("zero 0, a ring")[-1]
    for (slopes, weights), held in zip(ranks(2, by_hand), last.held, strict=True):
        assert slopes == pytest.approx(SUMS)
        assert list(held["parameters"]) == pytest.approx(weights, rel=1e-6)


def test_a_ring_adds_up_chunk_by_chunk_and_a_tree_at_once() -> None:
    ring = [frame.moved for frame in done("zero 0, a ring") if frame.moved]
    assert ring == [((0, 1, ("b",)), (1, 0, ("w1", "w2"))), ((0, 1, ("w1", "w2")), (1, 0, ("b",)))]
    tree = [frame.moved for frame in done("zero 0, a tree") if frame.moved]
    assert tree == [((1, 0, ("w1", "w2", "b")),), ((0, 1, ("w1", "w2", "b")),)]


def test_a_rank_holds_what_its_stage_says() -> None:
    zero_3, zero_2, zero_1 = (done(f"zero {stage}, a ring") for stage in (3, 2, 1))
    assert [rank["parameters"] for rank in zero_3[0].held] == [(*START[:2], None), (None, None, START[2])]
    assert all(rank["parameters"] == START for rank in zero_3[2].held)
    assert [rank["reduced gradients"] for rank in zero_2[-3].held] == [
        (pytest.approx(SUMS[0]), pytest.approx(SUMS[1]), None),
        (None, None, pytest.approx(SUMS[2])),
    ]
    assert all(rank["gradients"] == (None, None, None) for rank in zero_2[-3].held)
    # Each has updated its share alone, and the other's comes with the last moment.
    assert [rank["parameters"][2] == START[2] for rank in zero_1[-2].held] == [True, False]


@pytest.mark.parametrize("name", WAYS)
def test_a_value_that_came_from_another_rank_was_sent(name: str) -> None:
    for before, after in pairwise(done(name)):
        if "round" in after.told:
            taken = {(b, one) for _, b, names in after.moved for one in names}
            for rank, (old, new) in enumerate(zip(before.held, after.held, strict=True)):
                changed = {
                    one
                    for what in old
                    for one, a, b in zip(("w1", "w2", "b"), old[what], new[what], strict=True)
                    if a != b
                }
                own = changed - {one for to, one in taken if to == rank}
                # What a rank puts into the whole itself is its own shard.
                assert not own or after.told.startswith("All-gather")
