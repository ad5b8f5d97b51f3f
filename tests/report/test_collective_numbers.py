"""Collectives in numbers: every round has what the one before sent, and they end with what they are for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.report.collective_numbers import EXAMPLES, collective_frames
from paceline.report.teaching import Frame
from tests.report.browser import Browser


def held(frame: Frame) -> list[list[float | None]]:
    return [list(each["holds"]) for each in frame.held]


@pytest.mark.parametrize("way", ["ring", "tree"])
def test_an_all_reduce_ends_with_the_sums_everywhere(way: str) -> None:
    (frames,) = [collective_frames(each) for name, each in EXAMPLES.items() if each.algorithm == f"all_reduce/{way}"]
    assert held(frames[0]) == [[10.0**rank] * 4 for rank in range(4)]
    assert held(frames[-1]) == [[1111.0] * 4] * 4
    # A ring of N takes 2 (N - 1) rounds, a tree 2 log2 N.
    assert len(frames) - 1 == (6 if way == "ring" else 4)
    for before, after in pairwise(frames):
        had, has = held(before), held(after)
        for rank in range(4):
            for index in range(4):
                came = [had[a][index] for a, b, chunks in after.moved if b == rank and f"chunk {index}" in chunks]
                own = had[rank][index]
                assert own is not None
                wanted = {own, *(value for value in came if value is not None)}
                assert has[rank][index] in (wanted | {own + sum(value or 0.0 for value in came)})
                assert came or has[rank][index] == own


def test_a_ring_sends_one_chunk_to_one_neighbour() -> None:
    frames = collective_frames(EXAMPLES["a ring's reduce-scatter, 4 ranks and 4 chunks"])
    assert len(frames) == 4
    for number, frame in enumerate(frames[1:], start=1):
        assert {(b - a) % 4 for a, b, _ in frame.moved} == {3} and all(len(what) == 1 for *_, what in frame.moved)
        assert f"Round {number} of 3: rank 0 sends rank 3 chunk" in frame.told and "adds it up" in frame.told
        # So many ranks' numbers are in the fullest chunk of each rank.
        digits = [[str(int(value or 0)).count("1") for value in values] for values in held(frame)]
        assert [max(each) for each in digits] == [number + 1] * 4
    assert [values[rank] for rank, values in enumerate(held(frames[-1]))] == [1111.0] * 4


def test_a_tree_adds_eight_numbers_up_in_three_rounds() -> None:
    frames = collective_frames(EXAMPLES["a tree's reduce, 8 ranks"])
    assert len(frames) == 4 and [len(frame.moved) for frame in frames] == [0, 4, 2, 1]
    assert held(frames[-1])[0] == [-0.1]


@pytest.mark.full
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_goes_through_them(shown: Browser, name: str) -> None:
    script = """(() => { const picker = document.getElementById('numbers-way');
      picker.value = [...picker.options].find((option) => option.text === arguments[0]).value;
      picker.dispatchEvent(new Event('change')); })()"""
    moments = """[...Array(arguments[0]).keys()].map((number) => {
      numbers.player.go(number);
      const rows = [...document.querySelectorAll('#numbers-held tr')];
      return [rows.map((r) => [...r.cells].map((c) => c.textContent)),
        document.querySelector('#numbers .told').textContent];
    })"""
    shown.run(script, name)
    example = EXAMPLES[name]
    frames = collective_frames(example)
    for frame, ((head, *rows), told) in zip(frames, shown.run(moments, len(frames)), strict=True):
        assert head == ["", *example.names]
        assert [row[1:] for row in rows] == [[f"{value:.3f}" for value in values] for values in held(frame)]
        assert frame.told in told
