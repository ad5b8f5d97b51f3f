"""The course docs/tutorial.md runs from beginning to end, and what it says of bytes and memory is so."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool

pytestmark = pytest.mark.full
DOCS = Path(__file__).parent.parent / "docs"
COURSE = runpy.run_path(str(DOCS / "make_tutorial.py"))
PAGE = (DOCS / "tutorial.md").read_text()
SMALLER = {"1024": "16", "STEPS = 12": "STEPS = 6"}
"""So that a test takes seconds; the model, its buckets and what is sent stay the page's."""


def take(folder: Path) -> dict[str, dict[str, float]]:
    """What a rank that takes the course measures."""
    measured: dict[str, dict[str, float]] = COURSE["read"](folder, SMALLER)["measured"]
    return measured


@pytest.fixture(scope="module")
def course(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("course")
    return folder, ranks(2, take, folder)


def test_nine_steps_each_with_its_page_and_picture(course: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (first, _) = course
    assert [int(name[0]) for name in first] == list(range(1, 10))
    for name in first:
        assert 'id="timeline-data"' in (folder / f"{name}.html").read_text()
        assert (DOCS / "images" / "tutorial" / f"{name}.png").stat().st_size < 20_000
        assert f"(images/tutorial/{name}.png)" in PAGE and f"<!-- {name} -->" in PAGE
    titles = re.findall(r"^## (\d)\.", PAGE, re.M)
    assert titles == [str(number) for number in range(1, 10)]


def test_what_the_page_says_of_bytes_and_memory_is_so(course: tuple[Path, list[dict[str, Any]]]) -> None:
    _, both = course
    for measured in both:
        found = {name[0]: figures for name, figures in measured.items()}
        whole = found["1"]["sent_mib"]
        for number in "234567":
            # Statistics and what shards are padded with are all that differs.
            assert found[number]["sent_mib"] == pytest.approx(whole, rel=0.01)
        assert 1.3 * whole < found["8"]["sent_mib"] <= 1.51 * whole
        assert found["9"]["sent_mib"] == pytest.approx(found["8"]["sent_mib"] / 2, rel=0.01)
        held = [found[number]["held_mib"] for number in "456789"]
        assert held[0] == held[1] and held[1:] == sorted(held[1:], reverse=True)
        # One for each of 18 parameters, and one in which ranks agree that all is well.
        assert found["1"]["collectives"] == 19 > found["4"]["collectives"] == found["5"]["collectives"]


def test_the_figures_are_of_the_same_course(course: tuple[Path, list[dict[str, Any]]]) -> None:
    kept = COURSE["results"]()["steps"]
    _, (first, _) = course
    assert list(kept) == list(first)
    for name, figures in first.items():
        for key in ("sent_mib", "collectives", "held_mib"):
            assert kept[name][key][0] == pytest.approx(figures[key], rel=1e-3), f"{name}: run docs/make_tutorial.py"


def test_one_process_takes_it_too(ranks: RankPool, tmp_path: Path) -> None:
    ((measured),) = ranks(1, take, tmp_path)
    assert all(figures["sent_mib"] == figures["exposed_ms"] == 0 for figures in measured.values())
    assert len(list(tmp_path.glob("*.html"))) == 9
