"""The step of two ranks in numbers under hand and keyboard, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.report.run import read_run
from paceline.report.strategies import compared
from paceline.report.teaching import WAYS, frames
from tests.quick import full
from tests.report.browser import Browser

RIGHT, LEFT, END, HOME = "\ue014", "\ue012", "\ue010", "\ue011"


def press(page: Browser, keys: str) -> None:
    page.window.find_element("css selector", "#numbers input").send_keys(keys)
    page.settle()


def act(page: Browser, name: str) -> None:
    page.window.find_element("css selector", f"#numbers [data-act={name}]").click()
    page.settle()


def cells(page: Browser) -> list[list[str]]:
    script = "[...document.querySelectorAll('#numbers-held tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    rows: list[list[str]] = page.run(script)
    return rows


def test_the_last_moment_has_the_weights_worked_by_hand(shown: Browser) -> None:
    assert "w1 = 0.9631, w2 = 0.3893, b = 0.1012" in shown.text("#numbers-intro")
    act(shown, "last")
    assert cells(shown)[0] == ["", "w1", "w2", "b"]
    assert [row[1:] for row in cells(shown) if row[0].endswith(": parameters")] == [["0.9631", "0.3893", "0.1012"]] * 2
    assert shown.run("document.querySelector('#numbers [data-act=next]').disabled")


def test_buttons_keys_and_the_slider_go_from_moment_to_moment(shown: Browser) -> None:
    told = [frame.told for frame in frames(*WAYS["zero 0, a ring"])]
    assert shown.text("#numbers .told") == f"1 of {len(told)}: {told[0]}"
    act(shown, "next")
    assert told[1] in shown.text("#numbers .told")
    press(shown, RIGHT * 3)
    assert shown.run("numbers.player.index()") == 4 and told[4] in shown.text("#numbers .told")
    changed = "[...document.querySelectorAll('#numbers-held td.changed')].map((c) => c.textContent)"
    assert shown.run(changed) == ["-190.096", "-68.316", "-34.158"]
    press(shown, LEFT)
    assert shown.run("numbers.player.index()") == 3
    press(shown, END)
    assert shown.run("numbers.player.index()") == len(told) - 1
    press(shown, HOME)
    assert shown.run("numbers.player.index()") == 0
    assert shown.run("document.querySelector('#numbers input').getAttribute('aria-valuetext')").endswith(told[0])


@pytest.mark.full
def test_it_plays_when_asked_and_stops_when_somebody_steps(shown: Browser) -> None:
    assert not shown.run("numbers.player.isPlaying()")
    act(shown, "play")
    assert shown.text("#numbers [data-act=play]") == "Pause"
    shown.wait_for("numbers.player.index() > 0")
    press(shown, " ")
    assert not shown.run("numbers.player.isPlaying()") and shown.text("#numbers [data-act=play]") == "Play"
    shown.run("numbers.player.go(0)")
    act(shown, "play")
    act(shown, "next")
    assert not shown.run("numbers.player.isPlaying()")


@pytest.mark.parametrize("name", [full("parameter server"), "zero 3, a ring"])
def test_another_strategy_is_another_step(shown: Browser, name: str) -> None:
    script = """(() => { const picker = document.getElementById('numbers-way');
      picker.value = [...picker.options].find((option) => option.text === arguments[0]).value;
      picker.dispatchEvent(new Event('change')); })()"""
    act(shown, "last")
    shown.run(script, name)
    expected = frames(*WAYS[name])
    assert shown.text("#numbers .told") == f"1 of {len(expected)}: {expected[0].told}"
    for number, frame in enumerate(expected):
        shown.run("numbers.player.go(arguments[0])", number)
        values = [["–" if v is None else f"{v:.4f}" for v in held["parameters"]] for held in frame.held]
        assert [row[1:] for row in cells(shown) if row[0].endswith(": parameters")] == values


def test_strategies_stand_side_by_side(run: Path, shown: Browser) -> None:
    found = read_run(run)
    assert found.program is not None
    listed, _ = compared(found.program, found.what_if)
    script = "[...document.querySelectorAll('#synchronisation tbody')[0].rows].map((r) => r.cells[0].textContent)"
    names = shown.run(script)
    assert [name.removesuffix(" (this run)") for name in names] == [each.name for each in listed]
    assert sum(name.endswith("(this run)") for name in names) == 1
    assert "Backward fills" in shown.text("#synchronisation .sentence")
