"""The timeline under hand and keyboard, in a real browser, of a run of two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.report.run import read_run
from tests.report.browser import Browser


def test_pointing_at_an_op_tells_what_it_is(shown: Browser) -> None:
    step = shown.run("timeline.data.typical")
    columns = shown.run("timeline.data.steps[arguments[0]]", step)
    index = max(range(len(columns["took"])), key=lambda i: columns["took"][i])
    place = shown.run("timeline.boxOf(arguments[0])", index)
    shown.point(place["x"], place["y"])
    told = shown.text("#details")
    kind, name = shown.run("timeline.data.kinds"), shown.run("timeline.data.names")
    assert told.startswith(f"{kind[columns['kind'][index]]} of {name[columns['name'][index]]}; rank ")
    assert told == shown.run("timeline.describe(arguments[0])", index)


def test_a_collective_names_the_rank_that_came_last_and_its_bytes(shown: Browser) -> None:
    columns = shown.run("timeline.data.steps[timeline.data.typical]")
    rank_of = [columns["lanes"][lane][0] for lane in columns["lane"]]
    waits = [i for i, met in enumerate(columns["meeting"]) if met >= 0 and columns["last"][met] == 1 and not rank_of[i]]
    told = [shown.run("timeline.describe(arguments[0])", i) for i in waits]
    assert any(
        re.search(r"a buffer of .* of which this rank sent .*; rank 1 came last, [\d.]+ ms later", t) for t in told
    )


def test_zoom_and_moving(shown: Browser) -> None:
    def view() -> tuple[float, float]:
        state = shown.run("[timeline.state.from, timeline.state.to]")
        return state[0], state[1]

    whole = view()
    shown.click("zoom-in")
    near = view()
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2)
    assert sum(near) == pytest.approx(sum(whole))
    shown.press("+")
    assert view()[1] - view()[0] == pytest.approx((whole[1] - whole[0]) / 4)
    before = view()
    shown.press("\ue014")  # the arrow to the right
    assert view()[0] - before[0] == pytest.approx(0.2 * (before[1] - before[0]))
    shown.click("zoom-out")
    shown.press("0")
    assert view() == pytest.approx(whole)
    # Never beyond the step, however often.
    shown.press("+" * 60)
    assert view()[1] - view()[0] > 0
    shown.press("\ue012" * 40 + "-" * 70)
    assert view() == pytest.approx(whole)


def test_the_wheel_zooms_at_the_pointer(shown: Browser) -> None:
    at = shown.run("timeline.state.length / 3")
    x = shown.run("timeline.boxOf(0).x")
    script = """(() => {
      const canvas = document.getElementById('lanes'), box = canvas.getBoundingClientRect();
      canvas.dispatchEvent(new WheelEvent('wheel', {ctrlKey: true, deltaY: -300, clientX: box.x + arguments[0],
        clientY: box.y + 30, bubbles: true, cancelable: true}));
    })()"""
    shown.run(script, x)
    shown.settle()
    assert shown.run("timeline.boxOf(0).x") == pytest.approx(x, abs=shown.run("timeline.state.step.took[0]") * 10 + 2)
    assert shown.run("timeline.state.to - timeline.state.from") < 3 * at / 2


def test_the_keyboard_walks_over_ops(shown: Browser) -> None:
    shown.press("n")
    assert shown.run("timeline.state.selected") == 0
    shown.press("nn")
    assert shown.run("timeline.state.selected") == 2
    shown.press("p")
    assert shown.run("timeline.state.selected") == 1
    shown.press("\ue015")  # down
    assert shown.run("timeline.state.step.lane[timeline.state.selected]") == 1
    assert shown.text("#details") == shown.run("timeline.describe(timeline.state.selected)")
    shown.press("c")
    assert shown.run("timeline.state.critical") is True
    assert shown.run("document.getElementById('critical').getAttribute('aria-pressed')") == "true"
    shown.press("\ue00c")
    assert "Point at an op" in shown.text("#details")


def test_the_step_picker_shows_another_step(run: Path, shown: Browser) -> None:
    slowest = read_run(run).slowest
    assert slowest is not None
    script = """(() => { const picker = document.getElementById('step');
      picker.value = [...picker.options].find((option) => option.text.startsWith(arguments[0])).value;
      picker.dispatchEvent(new Event('change')); })()"""
    shown.run(script, "slowest")
    shown.settle()
    assert shown.run("timeline.state.step.number") == slowest.number
    assert shown.run("timeline.state.length") >= 1e6 * slowest.seconds * 0.999
    shown.run(script, "step 4,")
    assert shown.run("timeline.state.step.number") == 4


def test_predicted_lanes_lie_under_the_measured_ones_and_can_be_hidden(run: Path, shown: Browser) -> None:
    prediction = read_run(run).prediction
    assert prediction is not None
    columns = shown.run("timeline.data.predicted")
    for rank, seconds in prediction.seconds.items():
        computed = [i for i, lane in enumerate(columns["lane"]) if columns["lanes"][lane] == [rank, 0]]
        ends = max(columns["start"][i] + columns["took"][i] for i in computed)
        assert ends - min(columns["start"][i] for i in computed) == pytest.approx(seconds * 1e6, abs=1)
    lanes, order = shown.run("timeline.state.step.lanes"), shown.run("timeline.state.order")
    assert [lanes[lane][0] for lane in order] == sorted(lane[0] for lane in lanes)
    assert [len(lanes[lane]) for lane in order if lanes[lane][0] == 0] == sorted(len(x) for x in lanes if x[0] == 0)
    first = shown.run("timeline.data.steps[timeline.data.typical].start.length")
    place = shown.run("timeline.boxOf(arguments[0])", first)
    shown.point(place["x"], place["y"])
    assert shown.text("#details").startswith("predicted: ")
    tall = shown.run("document.getElementById('lanes').clientHeight")
    shown.click("predicted")
    assert shown.run("timeline.state.lanes.length") == len(lanes) - len(columns["lanes"])
    assert shown.run("document.getElementById('lanes').clientHeight") < tall


def test_a_bucket_names_its_parameters(shown: Browser) -> None:
    columns = shown.run("timeline.data.steps[timeline.data.typical]")
    names, streams = shown.run("timeline.data.names"), shown.run("timeline.data.streams")
    reduced = [i for i, lane in enumerate(columns["lane"]) if streams[columns["lanes"][lane][1]] == "reduce"]
    parameters = shown.run("timeline.data.parameters")
    assert any("blocks.1.attention.qkv.weight" in each for each in parameters.values())
    for i in reduced:
        assert f"; parameters {parameters[names[columns['name'][i]]]};" in shown.run(
            "timeline.describe(arguments[0])", i
        )
