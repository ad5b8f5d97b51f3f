"""The run's own step under hand and keyboard, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.report.moments import Moment, moments
from paceline.report.run import read_run
from tests.report.browser import Browser

RIGHT, END = "\ue014", "\ue010"


@pytest.fixture
def expected(run: Path) -> list[Moment]:
    found = read_run(run)
    assert found.program is not None
    listed = moments(found.program, "ring", None if found.what_if is None else found.what_if.times())
    assert listed is not None
    return listed


def press(page: Browser, keys: str) -> None:
    page.window.find_element("css selector", "#holdings input").send_keys(keys)
    page.settle()


def test_every_moment_of_the_runs_schedule_can_be_stepped_to(shown: Browser, expected: list[Moment]) -> None:
    held: dict[int, list[object]] = {}
    for number, moment in enumerate(expected):
        held |= {h.bucket: [h.filled, h.gradients, h.reduced, h.parameters] for h in moment.held}
        assert shown.text("#holdings .told").startswith(f"{number + 1} of {len(expected)}: {moment.told}")
        assert shown.run("holdings.shown().now") == [held[bucket] for bucket in sorted(held)]
        label = shown.run("document.getElementById('holdings-drawn').getAttribute('aria-label')")
        assert label.startswith(moment.told) and "Rank 0 holds of" in label
        press(shown, RIGHT)
    assert shown.run("document.querySelector('#holdings [data-act=next]').disabled")


def test_buckets_are_named_with_what_fills_them(run: Path, shown: Browser) -> None:
    program = read_run(run).program
    assert program is not None
    buckets = shown.run("holdings.data.buckets")
    assert [name for name, *_ in buckets] == [bucket.name for bucket in program.schedule.reduced_buckets]
    assert shown.run("holdings.data.chunks") == shown.run("holdings.data.ranks") == 2


@pytest.mark.full
def test_it_is_drawn_on_a_small_screen_in_the_dark_and_on_paper(run: Path, page: Browser) -> None:
    page.open(run / "report.html", 400, dark=True)
    assert page.run("document.documentElement.scrollWidth") <= 400
    press(page, END)
    drawn = "document.getElementById('holdings-drawn').toDataURL()"
    dark = page.run(drawn)
    assert len(dark) > 2000
    page.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page.settle()
    assert page.run("getComputedStyle(document.querySelector('#holdings .controls')).display") == "none"
    assert page.run("getComputedStyle(document.querySelector('#holdings .told')).display") == "block"
    assert page.run(drawn) != dark


def test_nothing_moves_by_itself(shown: Browser) -> None:
    assert shown.run("holdings.player.index()") == 0
    assert not shown.run("holdings.player.isPlaying()")
    assert shown.run("document.getAnimations().length") == 0
