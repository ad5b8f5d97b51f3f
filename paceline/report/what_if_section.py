"""The page's section that asks what if: sliders that redraw the predicted step, and what single changes would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.command_line import quantities as said
from paceline.report.html import Html, Section, data, join, table, tag
from paceline.report.run import Run
from paceline.report.single_changes import Single
from paceline.report.timeline import legend
from paceline.report.variants import Choices, choices
from paceline.report.what_if import Predicted, WhatIf
from paceline.report.what_if_grid import grid

_LEAST_GAIN = 0.01
"""Of a step: a change that saves less is not worth naming."""


def what_if(run: Run) -> Section:
    """The section."""
    tried = run.what_if
    if tried is None or run.program is None:
        return Section("what-if", "What if", f"There is nothing to simulate: {_missing(run)}.", Html(""))
    offered = choices(run.program)
    drawn = grid(tried, offered)
    body = [
        tag("div", *_sliders(offered), tag("button", "As run", type="button", id="what-if-own"), class_="sliders"),
        tag("p", id="what-if-told", role="status"),
        tag("canvas", id="what-if-lanes", role="img", aria_label="The step as run and with other settings"),
        legend(),
        _changes(tried, run.single_changes),
        tag("p", _assumed(run, tried), class_="note"),
        data("what-if-data", drawn),
    ]
    return Section("what-if", "What if", _sentence(tried, run.single_changes), join(body))


def _missing(run: Run) -> str:
    if run.world_size == 1:
        return "one rank alone sends nothing, so what sending costs is not known"
    if run.prediction is None or run.program is None:
        return "the schedule of the recorded steps is not known, or none are recorded"
    if run.link is not None:
        return "no op took any time"
    return (
        "the run's collectives are all of one size, from which what a round costs cannot be told from what a byte "
        "costs; smaller buckets would tell"
    )


def _sliders(offered: Choices) -> Iterator[Html]:
    for name, words, count in (
        ("stage", "Stage", len(offered.stages)),
        ("devices", "Devices", len(offered.devices)),
        ("bucket", "Bucket size", len(offered.bucket_mb)),
        ("bandwidth", "Bandwidth of a rank's link", 81),
    ):
        slider = tag("input", type="range", id=f"what-if-{name}", min=0, max=count - 1, step=1)
        yield tag("label", tag("span", words), slider, tag("output", id=f"what-if-{name}-told"))


def _changes(tried: WhatIf, singles: Sequence[Single]) -> Html:
    """What one change at a time would do, of which the page has a picture for each."""
    now = tried.predict(tried.own)
    rows = [("as run", *_cells(now, now), said.size(tried.sent(tried.own)))]
    rows += [(each.words, *_cells(each.step, now), said.size(tried.sent(each.setting))) for each in singles]
    heads = ("One change", "A step takes", "Of as run", "Nothing computes", "A rank sends")
    return table("One change at a time, by simulation", heads, rows)


def _cells(step: Predicted, now: Predicted) -> tuple[str, str, str]:
    return said.seconds(step.seconds), said.share(step.seconds / now.seconds), said.seconds(step.exposed)


def _sentence(tried: WhatIf, singles: Sequence[Single]) -> str:
    own = tried.own
    now = tried.predict(own).seconds
    found = [(each.step.seconds, each.words) for each in singles if each.setting.devices == own.devices]
    links = f"links of {tried.link.in_words}" if tried.link.has_limit else "links whose bandwidth cannot be told"
    told = (
        f"As run (zero {own.stage}, {said.count(own.devices, 'device')}, buckets of {said.digits(own.bucket_mb)} MiB, "
        f"{links}) a step is predicted to take {said.seconds(now)}"
    )
    best, words = min(found, default=(now, ""))
    if best > (1 - _LEAST_GAIN) * now:
        more = ", nor would twice the bandwidth" if tried.link.has_limit else ""
        return f"{told}; no other stage or bucket size would shorten it by 1 %{more}."
    return f"{told}; of single changes with as many devices, {words} would shorten it most, to {said.seconds(best)}."


def _assumed(run: Run, tried: WhatIf) -> str:
    assert run.link is not None
    how = "of the bandwidth chosen" if run.link.has_limit else "on which bytes are free, as larger ones took no longer,"
    return (
        f"The step is that of rank {tried.rank}, from the end of the step before to its own. As run, each op takes "
        "what it took, with nobody to wait for and no pause between ops; from its first op to its last that is what "
        "the timeline predicts. Schedules of other settings are built by the run's own builder. It is assumed that a "
        "device computes in a step what a rank of the run does, so that more devices do more; that forward and "
        "backward take what they took; that copying gradients, updating and rounding take as long for each element as "
        "they took, and ops of which the run has none no time; that collectives go around a ring of their ranks, over "
        f"links {how} and {said.seconds(run.link.latency)} a round; and that a kind of collective "
        "takes so many times what the fitted link says as it did in the run (a kind that the run has none of: as all "
        "did together). Whether memory suffices is not looked at."
    )
