"""Norms of gradients by parameter and rank, as the page tells of them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.report.gradient_norms import Norms, norms_by_rank, read_norms, sentence, sums
from paceline.report.lines import Damage
from paceline.report.page import page as page_of
from paceline.report.run import read_run
from tests.report.browser import Browser


def line(step: int, name: str, local: list[list[Any]], reduced: list[Any], whole: Any) -> dict[str, Any]:
    return {"step": step, "parameter": name, "local": local, "reduced": reduced, "whole": whole}


NORMS = [
    line(8, "embed.weight", [[3.0, 1.0]], [2.0, 1.5], 2.5),
    line(8, "<script>alert(1)</script>", [[4.0, 2.0]], [6.0, None], 6.0),
    line(8, "idle", [[None, None]], [None, None], None),
]


def written(path: Path, lines: list[dict[str, Any]], rest: str = "") -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines) + rest)
    return path


def test_the_sentence_says_who_is_longest_and_how_far_ranks_agree(tmp_path: Path) -> None:
    norms = read_norms(written(tmp_path / "norms", NORMS), damage := Damage())
    assert damage == Damage() and [each.parameter for each in norms] == [each["parameter"] for each in NORMS]
    found = sums(norms)
    assert found.by_rank == pytest.approx((5.0, math.sqrt(5)))
    assert found.kept == pytest.approx(6.5 / (5 + math.sqrt(5)))
    assert found.widest == ("embed.weight", 3.0)
    assert sentence(norms) == (
        "In step 8 rank 0's gradient was the longest before it was reduced, 5.00, 2.24 times that of rank 1, the "
        "shortest (2.24); ranks differ most in embed.weight, 3.00 times. The sum is 89.8 % of what it would be if all "
        "that was given pointed the same way."
    )


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            [line(1, "a", [[2.0, 2.0]], [4.0, 4.0], 4.0)],
            "equally long before they were reduced, 2.00. The sum is 100 %",
        ),
        ([line(1, "a", [["inf", 2.0]], ["inf", "inf"], "inf")], "the gradient of rank 0 was not finite before"),
        ([line(1, "a", [["nan", "inf"]], ["nan", None], "nan")], "the gradient of ranks 0, 1 was not finite before"),
        (
            [line(1, "a", [[0.0, 1.0]], [1.0, 1.0], 1.0)],
            "was the longest before it was reduced, 1.00, the shortest (0)",
        ),
        # More came after the copy-in than what was given.
        ([line(1, "a", [[None, 1.0]], [9.0, 9.0], 9.0)], "reduced, 1.00, the shortest (0)."),
        # Each of two micro-batches was reduced: ranks are compared in the last, the sum with both.
        ([line(1, "a", [[1.0, 1.0], [1.0, 3.0]], [3.0, 3.0], 3.0)], "3.00, 3.00 times that of rank 0"),
        ([line(1, "a", [[1.0, 1.0], [1.0, 3.0]], [3.0, 3.0], 3.0)], "The sum is 50.0 %"),
        ([line(1, "a", [[0.0, 0.0]], [0.0, 0.0], 0.0)], "equally long before they were reduced, 0."),
    ],
)
def test_what_is_odd_is_told_right(tmp_path: Path, lines: list[dict[str, Any]], told: str) -> None:
    assert told in sentence(read_norms(written(tmp_path / "norms", lines), Damage()))


def test_the_latest_step_is_read_and_what_is_damaged_left_out(tmp_path: Path) -> None:
    bad = [
        line(9, "a", [[1.0]], [1.0, 1.0], 1.0),
        line(9, "a", [], [1.0, 1.0], 1.0),
        line(9, "a", [[1.0, -1.0]], [1.0, 1.0], 1.0),
        line(9, "a", [[1.0, "large"]], [1.0, 1.0], 1.0),
        {"step": 9},
    ]
    again = line(8, "idle", [[1.0, 1.0]], [2.0, 2.0], 2.0)
    path = written(tmp_path / "norms", [line(4, "a", [[1.0, 1.0]], [2.0, 2.0], 2.0), *NORMS, again, *bad], '{"step"')
    assert read_norms(path, damage := Damage()) == (Norms(8, "idle", [[1.0, 1.0]], [2.0, 2.0], 2.0),)
    assert damage == Damage(len(bad), is_cut=True)
    assert read_norms(tmp_path / "none", Damage()) == ()
    assert "--log.gradient-norms" in norms_by_rank((), None)


def test_many_parameters_and_ranks_are_said_to_be_left_out() -> None:
    ranks = 40
    norms = [Norms(1, f"p{i}", [[float(i)] * ranks], [float(i)] * ranks, float(i)) for i in range(1000)]
    told = norms_by_rank(norms, None)
    assert "the 300 of 1,000 parameters whose gradients are the longest" in told and "16 of 40 ranks" in told
    assert ">p999<" in told and ">p700<" in told and ">p699<" not in told and "rank 16" not in told


def test_the_page_has_each_norm_beside_its_rank(run: Path, page: Browser, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    written(copy / "gradient_norms.jsonl", NORMS)
    (copy / "report.html").write_text(page_of(read_run(copy)))
    for width, dark in ((1280, False), (400, True)):
        page.open(copy / "report.html", width, dark=dark)
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.text("#norms-told") == sentence(read_norms(copy / "gradient_norms.jsonl", Damage()))
        heads = page.run("[...document.querySelectorAll('#norms thead th')].map(e => e.textContent)")
        assert heads == ["parameter", "rank 0 before", "rank 1 before", "rank 0 after", "rank 1 after", "whole"]
        rows = page.run(
            "[...document.querySelectorAll('#norms tbody tr')].map(e => [...e.children].map(c => c.textContent))"
        )
        assert rows == [
            ["embed.weight", "3.00", "1.00", "2.00", "1.50", "2.50"],
            ["<script>alert(1)</script>", "4.00", "2.00", "6.00", "–", "6.00"],
            ["idle", "–", "–", "–", "–", "–"],
        ]
        colours = page.run(
            "[...document.querySelectorAll('#norms tbody tr:first-child td')]"
            ".map(e => getComputedStyle(e).backgroundColor)"
        )
        # Shades of 3, 1, 2, 1.5 and 2.5, by quarters of the largest.
        assert [colours.index(colour) for colour in colours] == [0, 1, 2, 1, 0]
