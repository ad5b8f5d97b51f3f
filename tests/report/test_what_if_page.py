"""What if under hand and keyboard, in a real browser: its numbers are those of the simulation in Python."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.command_line import quantities as said
from paceline.core.events import Event
from paceline.core.simulate import simulate
from paceline.report.page import page as page_of
from paceline.report.page import write_page
from paceline.report.program import Program, program_of
from paceline.report.run import Run, read_run
from paceline.report.variants import Setting
from paceline.report.what_if import WhatIf
from paceline.train.command_line import parse_train_arguments
from tests.report.browser import Browser
from tests.report.events import lines
from tests.report.test_what_if import costs

RIGHT, LEFT = "\ue014", "\ue012"


@pytest.fixture(scope="module")
def linked(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of two ranks with events of a step over a link that is known, and its page."""
    return over(1e6, run, tmp_path_factory.mktemp("linked") / "run")


def over(bandwidth: float, run: Path, folder: Path, **strategy: Any) -> Run:
    """A run like another, over a link that is known, perhaps with another strategy."""
    shutil.copytree(run, folder)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["strategy"] = strategy or settings["strategy"]
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    config = parse_train_arguments([str(folder / "config.yaml")])
    known = program_of(folder, config, 2)
    assert known is not None
    (folder / "events.jsonl").write_text(lines(executed(known, bandwidth)))
    found = read_run(folder)
    write_page(page_of(found), folder / "report.html")
    return found


def executed(known: Program, bandwidth: float) -> list[Event]:
    """The events of a step of all ranks."""
    events = []
    for rank in range(known.schedule.world_size):
        schedule = replace(known.schedule, rank=rank)
        done = simulate(schedule, costs(schedule, bandwidth), known.micro_batches, 3)
        events += [event for event in done if event.step == 2]
    return events


@pytest.fixture
def opened(linked: Run, page: Browser) -> Browser:
    page.open(linked.path / "report.html")
    return page


@pytest.fixture
def expected(linked: Run) -> WhatIf:
    assert linked.program is not None and linked.prediction is not None and linked.link is not None
    return WhatIf(linked.program, linked.prediction, linked.link)


def seconds(page: Browser) -> float:
    return float(page.run("whatIf.shown().seconds")) / 1e6


def slide(page: Browser, name: str, keys: str) -> None:
    page.window.find_element("id", f"what-if-{name}").send_keys(keys)
    page.settle()


def test_as_run_it_is_the_timelines_prediction(linked: Run, opened: Browser) -> None:
    assert linked.prediction is not None
    longest = max(linked.prediction.seconds.values())
    assert opened.run("whatIf.shown().span") / 1e6 == pytest.approx(longest, rel=1e-4)
    assert said.seconds(longest) in opened.text("#timeline .sentence")
    told = opened.text("#what-if-told")
    assert f"{said.seconds(longest)} from its first op to its last" in told and ", as run:" in told
    assert f"is predicted to take {said.seconds(seconds(opened))}" in opened.text("#what-if .sentence")


def test_every_setting_takes_what_python_says(opened: Browser, expected: WhatIf) -> None:
    data = opened.run("whatIf.data")
    script = """(() => { const found = [], { stages, devices, buckets } = whatIf.data;
      stages.forEach((_, stage) => devices.forEach((_, device) => buckets.forEach((_, bucket) => {
        const step = whatIf.predict({ stage, devices: device, bucket }, arguments[0]);
        found.push([stage, device, bucket, step.seconds, step.span, step.exposed, step.sent]);
      })));
      return found; })()"""
    for bandwidth in (1e5, 3e8):
        every = opened.run(script, bandwidth)
        assert len(every) == len(data["settings"]) >= 4 * 5 * 3
        for stage, device, bucket, *numbers in every[:: 1 if bandwidth < 1e6 else 7]:
            setting = Setting(data["stages"][stage], data["devices"][device], data["buckets"][bucket])
            step = expected.predict(setting, bandwidth)
            shown = pytest.approx([step.seconds * 1e6, step.span * 1e6, step.exposed * 1e6], rel=1e-4, abs=2)
            assert numbers[:3] == shown, setting
            assert numbers[3] == expected.sent(setting)


def test_every_op_runs_when_python_says_and_is_exposed_as_long(opened: Browser, expected: WhatIf) -> None:
    schedule = expected.schedule(expected.own)
    costs = expected.costs(schedule)
    events = simulate(schedule, lambda op: costs[op.key].seconds(2e5), expected.micro_batches, 3)
    script = (
        "(({last}) => [last.before, last].map((s) => [s.start, s.end, s.exposed]))(whatIf.predict(arguments[0], 2e5))"
    )
    own = dict(zip(("stage", "devices", "bucket"), opened.run("whatIf.data.own"), strict=True))
    for step, columns in zip((1, 2), opened.run(script, own), strict=True):
        mine = [event for event in events if event.step == step]
        for column, name in zip(columns, ("start", "end", "exposed"), strict=True):
            assert column == pytest.approx([getattr(event, name) * 1e6 for event in mine], rel=1e-4, abs=2), name
    assert any(event.exposed for event in events if event.step == 1 and event.phase == "update")


def test_sliders_do_what_they_say(opened: Browser, expected: WhatIf) -> None:
    own, before = expected.own, seconds(opened)
    slide(opened, "stage", LEFT)
    assert opened.text("#what-if-stage-told") == "zero 1"
    assert seconds(opened) == pytest.approx(expected.predict(replace(own, stage=1)).seconds, rel=1e-4)
    slide(opened, "stage", RIGHT)
    assert opened.text("#what-if-stage-told") == "zero 2 (as run)" and seconds(opened) == before
    slide(opened, "devices", RIGHT)
    assert opened.text("#what-if-devices-told") == "4"
    assert seconds(opened) == pytest.approx(expected.predict(replace(own, devices=4)).seconds, rel=1e-4)
    assert "4 devices do" in opened.text("#what-if-told") and "more than as run" in opened.text("#what-if-told")
    opened.click("what-if-own")
    slide(opened, "bucket", LEFT)
    size = opened.run("whatIf.data.buckets[whatIf.state.bucket]")
    assert opened.text("#what-if-bucket-told") == f"{said.digits(size)} MiB"
    assert seconds(opened) == pytest.approx(expected.predict(replace(own, bucket_mb=size)).seconds, rel=1e-4)
    opened.click("what-if-own")
    slide(opened, "bandwidth", RIGHT * 20)
    assert opened.text("#what-if-bandwidth-told").endswith(", 10.0 times as run")
    step = expected.predict(own, 10 * expected.bandwidth)
    assert seconds(opened) == pytest.approx(step.seconds, rel=1e-4)
    assert "less than as run" in opened.text("#what-if-told") and said.seconds(step.seconds) in opened.text(
        "#what-if-told"
    )
    opened.click("what-if-own")
    assert seconds(opened) == before
    slide(opened, "stage", RIGHT)
    assert opened.run("document.getElementById('what-if-bucket').disabled")
    assert "no choice" in opened.text("#what-if-bucket-told")


def test_sliders_and_picture_say_what_they_are(opened: Browser) -> None:
    script = """[...document.querySelectorAll('.sliders input')].map(
      (slider) => [slider.labels[0].firstChild.textContent, slider.getAttribute('aria-valuetext')])"""
    named = dict(opened.run(script))
    assert list(named) == ["Stage", "Devices", "Bucket size", "Bandwidth of a rank's link"]
    assert named["Stage"] == "zero 2 (as run)" and "(as run)" in named["Bandwidth of a rank's link"]
    label = opened.run("document.getElementById('what-if-lanes').getAttribute('aria-label')")
    assert opened.text("#what-if-told") in label


def test_the_table_has_single_changes(opened: Browser, expected: WhatIf) -> None:
    script = "[...document.querySelectorAll('#what-if tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    rows = {row[0]: row[1:] for row in opened.run(script)}
    now = expected.predict(expected.own).seconds
    twice = expected.predict(expected.own, 2 * expected.bandwidth).seconds
    assert rows["as run"][:2] == [said.seconds(now), "100 %"]
    assert rows["twice the bandwidth"][:2] == [said.seconds(twice), said.share(twice / now)]
    zero = expected.predict(replace(expected.own, stage=3))
    assert rows["zero 3"] == [
        said.seconds(zero.seconds),
        said.share(zero.seconds / now),
        said.seconds(zero.exposed),
        said.size(expected.sent(replace(expected.own, stage=3))),
    ]


def test_the_section_on_communication_states_the_link(linked: Run, opened: Browser) -> None:
    assert linked.link is not None
    shown = opened.run("document.querySelector('[data-figure=link_bandwidth]').dataset.value")
    assert float(shown) == linked.link.bandwidth == pytest.approx(1e6)
    assert f"carries {said.rate(linked.link.bandwidth)}" in opened.text("#communication .sentence")
    script = "[...document.querySelectorAll('#communication table')].at(-1).querySelectorAll('tbody tr')"
    rows = opened.run(f"[...{script}].map((r) => [...r.cells].map((c) => c.textContent))")
    assert rows and all(row[5] == row[6] and row[7] == "100 %" for row in rows)


@pytest.mark.full
def test_it_is_drawn_in_the_dark_on_a_small_screen_and_on_paper(linked: Run, page: Browser) -> None:
    page.open(linked.path / "report.html", 400, dark=True)
    assert page.run("document.documentElement.scrollWidth") <= 400
    pixels = """(() => { const c = document.getElementById('what-if-lanes');
      return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size; })()"""
    assert page.run(pixels) > 20
    page.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page.settle()
    assert page.run("getComputedStyle(document.querySelector('.sliders')).display") == "none"
    assert page.run("getComputedStyle(document.getElementById('what-if-told')).display") == "block"


def test_where_bytes_are_free_there_is_no_bandwidth_to_choose(run: Path, page: Browser, tmp_path: Path) -> None:
    found = over(float("inf"), run, tmp_path / "run")
    assert found.what_if is not None and not found.what_if.link.has_limit
    page.open(found.path / "report.html")
    assert page.run("document.getElementById('what-if-bandwidth').disabled")
    slide(page, "devices", RIGHT)
    expected = found.what_if.predict(replace(found.what_if.own, devices=4))
    assert seconds(page) == pytest.approx(expected.seconds, rel=1e-4)
    assert "bandwidth cannot be told" in page.text("#what-if .sentence")


def test_where_no_single_change_goes_with_the_settings(run: Path, page: Browser, tmp_path: Path) -> None:
    """A server's gradients lie in one buffer, at no other stage; and where bytes are free, so is any bandwidth."""
    server = {"collective": "parameter_server", "packing": "flat", "synchronize": "after", "gradients": "sum"}
    found = over(float("inf"), run, tmp_path / "run", **server)
    assert found.what_if is not None and {each.setting.devices for each in found.single_changes} == {
        1,
        4,
        8,
        16,
        32,
        64,
    }
    page.open(found.path / "report.html")
    assert "no other stage or bucket size would shorten it by 1 %." in page.text("#what-if .sentence")
    slide(page, "stage", RIGHT)
    assert page.text("#what-if-told").startswith("These settings do not go together: ")


def test_steps_of_other_ranks_are_not_beside_the_schedules(run: Path, page: Browser, tmp_path: Path) -> None:
    """As of a run that went on with three ranks: the page is about two, whose steps are most."""
    found = over(1e6, run, tmp_path / "run")
    assert found.config is not None
    more = program_of(found.path, found.config, 3)
    assert found.program is not None and more is not None
    two, three = executed(found.program, 1e6), executed(more, 1e6)
    steps = [replace(event, step=step) for step, each in ((2, two), (5, two), (8, three)) for event in each]
    (found.path / "events.jsonl").write_text(lines(steps))
    write_page(page_of(read_run(found.path)), found.path / "report.html")
    page.open(found.path / "report.html")
    assert page.run("holdings.data.ranks") == 2
    assert page.run("timeline.data.steps.map((step) => step.isPredicted)") == [True, True, False]
    script = """(() => { const picker = document.getElementById('step');
      picker.value = arguments[0];
      picker.dispatchEvent(new Event('change')); })()"""
    page.run(script, 2)
    assert page.run("timeline.state.step.lanes.every((lane) => lane.length === 2)")
    assert page.run("document.getElementById('predicted').disabled")
    page.run(script, 0)
    assert page.run("timeline.state.step.lanes.some((lane) => lane.length === 3)")
    assert not page.run("document.getElementById('predicted').disabled")
