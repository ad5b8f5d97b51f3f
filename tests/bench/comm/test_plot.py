from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.comm.rows import CommRow, CopyRow

pytest.importorskip("matplotlib")

from paceline.bench.comm.plot import draw, spread

SYSTEMS = [("shared memory", name) for name in ("direct", "ring", "tree")] + [("tcp", "ring"), ("gloo", "own")]


def rows(op: str) -> list[CommRow]:
    return [
        CommRow(op, 2, transport, algorithm, size, size // 4, "float32", "sum", 5 + index + size / 1e4, 1, 1, 0, 1)
        for index, (transport, algorithm) in enumerate(SYSTEMS)
        for size in (1024, 16384, 262144)
    ]


def test_each_collective_has_a_panel_and_each_system_a_label(tmp_path: Path) -> None:
    copies = [CopyRow(op, 2, 1024, 1.0, 0.1, 1.0) for op in ("all_reduce", "all_gather")]
    draw([*rows("all_reduce"), *rows("all_gather")], copies, tmp_path / "out.svg")
    # matplotlib writes each text as a comment beside its glyphs.
    text = (tmp_path / "out.svg").read_text()
    for label in ("all_reduce, 2 ranks, float32", "all_gather, 2 ranks, float32"):
        assert text.count(f"<!-- {label} -->") == 1
    for label in ("shared memory, direct", "shared memory, tree", "tcp, ring", "gloo", "1k", "256k"):
        assert text.count(f"<!-- {label} -->") == 2, label
    assert text.count("<!-- copying as many bytes -->") == 1, "it bounds the all-reduce alone"


def test_a_png_is_one(tmp_path: Path) -> None:
    draw(rows("reduce"), [], tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@given(st.lists(st.floats(-0.5, 1.5), min_size=1, max_size=12))
def test_labels_keep_their_order_and_distance_and_stay_inside(places: list[float]) -> None:
    moved = spread(places, 0.1, -0.1, 1.1)
    order = sorted(range(len(places)), key=lambda index: places[index])
    for lower, upper in pairwise(order):
        assert moved[upper] - moved[lower] >= 0.1 - 1e-9
    assert min(moved) >= -0.1 - 1e-9
    assert max(moved) <= 1.1 + 1e-9


def test_labels_with_room_do_not_move_and_neighbours_share_the_way() -> None:
    assert spread([0.9, 0.1, 0.5], 0.1, 0, 1) == [0.9, 0.1, 0.5]
    assert spread([0.5, 0.5], 0.1, 0, 1) == pytest.approx([0.45, 0.55])
    assert spread([1.0, 1.0], 0.1, 0, 1) == pytest.approx([0.9, 1.0])
