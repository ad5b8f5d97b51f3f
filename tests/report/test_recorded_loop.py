"""A user's own loop: its steps are recorded, and the page says what the events say."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.events import Event, exposed_in_step
from paceline.executor import recorder
from paceline.executor.records import KEPT
from tests.ranks import RankPool
from tests.report.browser import Browser


def made(zero: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    pl.parallelize(model, pl.Strategy(zero=zero, bucket_mb=0.005))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: int = 1) -> None:
    optimizer.zero_grad()
    for rows in pl.accumulate(model, torch.ones(4 * batches, 32).chunk(batches)):
        model(rows).square().mean().backward()
    optimizer.step()


# ---- the page


def record_and_report(zero: int, out: str) -> dict[str, Any]:
    model, optimizer = made(zero)
    step(model, optimizer, 2)
    with pl.record(model) as events:
        assert len(events) == 0
        for _ in range(4):
            step(model, optimizer, 2)
    shown = pl.report(events, out)
    assert shown.path == Path(out)
    return {"events": [event.to_dict() for event in events], "frame": shown._repr_html_()}


def data(page: str, name: str) -> dict[str, Any]:
    (text,) = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', page)
    return json.loads(text)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("n", "zero"),
    [(2, 3), (2, 0), pytest.param(1, 0, marks=pytest.mark.full), pytest.param(1, 3, marks=pytest.mark.full)],
)
def test_the_page_says_what_the_events_say(ranks: RankPool, tmp_path: Path, n: int, zero: int) -> None:
    found = ranks(n, record_and_report, zero, str(tmp_path / "page.html"))
    by_rank = [[Event.from_dict(values) for values in each["events"]] for each in found]
    page = (tmp_path / "page.html").read_text()
    steps = sorted({event.step for event in by_rank[0]})
    assert steps == [1, 2, 3, 4]
    figures = {name: float(value) for name, value in re.findall(r'data-figure="(\w+)" data-value="(.*?)"', page)}
    assert figures["steps"] == 5
    # The first step is left out: what was sent before it is not known.
    spans = {number: max(map(span(number), by_rank)) for number in steps[1:]}
    shares = {number: sum(exposed_in_step(each, number) or 0.0 for each in by_rank) / n for number in spans}
    whole = sum(shares[number] * seconds for number, seconds in spans.items())
    assert figures["exposed"] == pytest.approx(whole / sum(spans.values()), rel=1e-6)
    assert (figures["exposed"] > 0) == (n > 1)
    drawn = data(page, "timeline-data")
    shown = [event for each in by_rank for event in each if event.phase != "update" or event.stream == "compute"]
    assert sum(len(each["start"]) for each in drawn["steps"]) == len(shown)
    seconds = {chart["title"]: chart for chart in data(page, "charts")["charts"]}["Seconds of a step"]
    assert seconds["steps"] == [number + 1 for number in steps]
    assert seconds["lines"][0]["values"][1:] == pytest.approx(list(spans.values()), rel=1e-5)
    # Its schedule is known: there is a prediction, and a plan of its memory.
    assert (drawn["predicted"] is not None) and "the schedule plans" in page
    for unknown in ("Last loss", "Tokens/s", "MFU", "Goodput", "not known", "settings cannot be read"):
        assert unknown not in page.partition('id="synchronisation"')[0]
    assert found[0]["frame"].startswith("<iframe")
    assert [each["frame"] for each in found[1:]] == [""] * (n - 1)


def span(number: int) -> Any:
    def of(events: list[Event]) -> float:
        ran = [event for event in events if event.step == number and event.stream == "compute"]
        return max(event.end for event in ran) - min(event.start for event in ran)

    return of


def test_a_notebook_shows_the_page(ranks: RankPool, tmp_path: Path, page: Browser) -> None:
    (found,) = ranks(1, record_and_report, 0, str(tmp_path / "page.html"))
    (tmp_path / "notebook.html").write_text(f"<!doctype html><title>A notebook</title>{found['frame']}")
    page.open(tmp_path / "notebook.html")
    page.window.switch_to.frame(0)
    try:
        assert page.text("h1") == "Sequential"
        page.press("n")
        assert "forward" in page.text("#details")
        assert page.run("document.links.length") == 0
    finally:
        page.window.switch_to.default_content()


# ---- the recording


def record_and_fail() -> None:
    model, optimizer = made(3)
    engine = pl.engine_of(model)
    with pytest.raises(KeyError), pl.record(model) as events:
        step(model, optimizer)
        step(model, optimizer)
        model(torch.ones(4, 32)).sum().backward()
        raise KeyError
    assert {event.step for event in events} == {0, 1}
    assert engine.program.executor._records.kept.maxlen == KEPT
    optimizer.step()
    optimizer.zero_grad()
    engine.record_events(False)
    with pl.record(model) as events:
        step(model, optimizer)
    assert sum(event.kind == "update" for event in events) == 1
    # It was off before, and is off again.
    step(model, optimizer)
    assert engine.program.executor.records is False
    assert not [event for event in engine.drain_events() if event.step > events[-1].step]


def test_an_exception_ends_the_recording_without_the_step_that_it_cut(ranks: RankPool) -> None:
    ranks(2, record_and_fail)


def record_and_reset() -> None:
    model, optimizer = made(0)
    with pl.record(model) as events:
        step(model, optimizer)
        with pytest.raises(RuntimeError):
            model(torch.ones(4, 31))
        pl.reset(model)
        step(model, optimizer)
        step(model, optimizer)
    assert sum(event.kind == "update" for event in events) == 3


def test_a_step_that_was_given_up_does_not_end_it(ranks: RankPool) -> None:
    ranks(1, record_and_reset)


def record_much(most: int) -> None:
    model, optimizer = made(0)
    whole = recorder.MOST_OPS
    recorder.MOST_OPS = most
    try:
        with pl.record(model) as events:
            for _ in range(8):
                step(model, optimizer)
    finally:
        recorder.MOST_OPS = whole
    counts = [sum(event.step == number for event in events) for number in sorted({event.step for event in events})]
    assert 1 <= len(counts) < 8 and events[-1].step == 7
    assert all(before == after for before, after in pairwise(counts))


def test_of_a_long_recording_the_last_whole_steps_are_kept(ranks: RankPool) -> None:
    ranks(1, record_much, 40)


def refused(folder: str) -> None:
    model, optimizer = made(3)
    with pytest.raises(ValueError, match="not parallel"), pl.record(nn.Linear(2, 2)):
        pass
    model(torch.ones(4, 32)).sum().backward()
    with pytest.raises(pl.EngineError, match="inside a step"), pl.record(model):
        pass
    optimizer.step()
    optimizer.zero_grad()
    with pl.record(model) as events:
        with pytest.raises(pl.EngineError, match="recorded already"), pl.record(model):
            pass
        with pytest.raises(pl.EngineError, match="recorded already"):
            pl.engine_of(model).drain_events()
        with pytest.raises(pl.UserError, match="no op was recorded"):
            pl.report(events, f"{folder}/early.html")
        step(model, optimizer)
    assert {event.kind for event in events} >= {"forward", "backward", "update"}
    with pytest.raises(pl.UserError, match="expected the events of"):
        pl.report(list(events))  # type: ignore[arg-type]
    with pytest.raises(pl.UserError, match="cannot be written"):
        pl.report(events, f"{folder}/none/page.html")


def test_what_cannot_be_recorded_or_reported_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, refused, str(tmp_path))
    assert not list(tmp_path.iterdir())


# ---- norms


def report_with_norms(zero: int, out: str, norms: bool) -> dict[str, Any]:
    model, optimizer = made(zero)
    rank = pl.init().rank
    with pl.record(model, norms=norms) as events:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(4, 32) * (rank + 1)).square().mean()).backward()
            optimizer.step()
    pl.report(events, out)
    copies, own = events.local_gradients, None if events.norms is None else events.norms.local
    pl.release(model)
    return {"local": own, "copies": None if copies is None else len(copies)}


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.full)])
def test_norms_are_on_the_page_if_asked_for(ranks: RankPool, tmp_path: Path, page: Browser, zero: int) -> None:
    path = tmp_path / "page.html"
    found = ranks(2, report_with_norms, zero, str(path), True)
    assert all(each["copies"] == 6 and len(each["local"]) == 1 for each in found)
    page.open(path)
    cells = "[0, 1].map(i => +e.querySelectorAll('td')[i].dataset.value)"
    rows = page.run(f"[...document.querySelectorAll('#norms tbody tr')].map(e => {cells})")
    for index, row in enumerate(rows):
        assert row == pytest.approx([each["local"][0][index] for each in found], rel=1e-6)
    # Of every bucket, its first moment with gradients has the whole of what each rank gave: its chunks together.
    data = page.run("holdings.data.ways[0].map(m => m[3]).flat()")
    first = [each for each in data if each[3] in ("0", "1")]
    squares = [sum(each[4] ** 2 for each in first if each[3] == str(rank)) for rank in range(2)]
    expected = [sum(norm**2 for norm in each["local"][0]) for each in found]
    assert squares == pytest.approx(expected, rel=2e-3)
    assert "step 2" in page.text("#norms caption") and "their mean" in page.text("#holdings-norms-told")


def test_norms_are_not_there_unless_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks(2, report_with_norms, 0, str(tmp_path / "page.html"), False)
    assert found[0] == {"local": None, "copies": None}
    text = (tmp_path / "page.html").read_text()
    assert "pl.record(model, norms=True)" in text and 'id="norms"' not in text and "holdings-norms-told" not in text
