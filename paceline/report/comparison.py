"""Two runs side by side: what differs in their settings, their figures, and where a step's time goes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.command_line import quantities as said
from paceline.report.curves import compared_charts, draw
from paceline.report.html import Html, Section, bar, join, table, tag
from paceline.report.rank_times import PARTS, parts_of
from paceline.report.run import Run
from paceline.report.steps import mean_times
from paceline.report.summary import key_figures, verdict

_ALIKE = 1.0005
"""Below it, the one run is not quicker than the other to a tenth of a percent."""
_TIMES = 2.0
"""From here on, how many times as many is easier to grasp than how much more."""
_OF_EVERY_RUN = ("folder", "resume")
"""Settings in which runs differ as they are two."""


def told_apart(one: Run, other: Run) -> tuple[Run, Run]:
    """Two runs with names that differ: of folders of one name with as many of those that they lie in as that takes."""
    first, second = one.path.resolve().parts, other.path.resolve().parts
    if one.name != other.name or first == second:
        return one, other
    count = next(count for count in range(2, len(first + second)) if first[-count:] != second[-count:])
    return replace(one, called="/".join(first[-count:])), replace(other, called="/".join(second[-count:]))


def comparison(one: Run, other: Run) -> list[Section]:
    """The sections of the page."""
    return [_figures(one, other), _settings(one, other), _steps(one, other), _curves(one, other)]


def _figures(one: Run, other: Run) -> Section:
    first, second = (
        {name: (label, words, value) for name, label, words, value in key_figures(r)} for r in (one, other)
    )
    rows: list[tuple[str, ...]] = []
    for name, (label, words, value) in first.items():
        if name in second:
            _, others, others_value = second[name]
            rows.append((label, words, others, "" if name == "slowest_rank" else _ratio(value, others_value)))
    steps = [run.typical.seconds if run.typical is not None else None for run in (one, other)]
    rows.append(("The typical step", *(said.seconds(s) if s is not None else "–" for s in steps), _ratio(*steps)))
    heads = ("", one.name, other.name, f"{other.name} by {one.name}")
    told = [tag("p", f"{run.name}: {verdict(run)}") for run in (one, other)]
    body = join([table("Figures of both", heads, rows), *told])
    return Section("figures", "Figures", _sentence(one, other), body)


def _sentence(one: Run, other: Run) -> str:
    rates = [run.history.mean("perf/tokens_per_second") for run in (one, other)]
    if rates[0] is None or rates[1] is None:
        return "Of one of the runs at least it is not known how many tokens/s it did."
    quick, slow = (one, other) if rates[0] >= rates[1] else (other, one)
    times = max(rates[0], rates[1]) / min(rates[0], rates[1]) if min(rates[0], rates[1]) > 0 else 1.0
    sentence = f"{one.name} and {other.name} do as many tokens/s"
    if times >= _ALIKE:
        sentence = (
            f"{quick.name} does {said.share(times - 1)} more tokens/s than {slow.name}"
            if times < _TIMES
            else f"{quick.name} does {said.digits(times)} times as many tokens/s as {slow.name}"
        )
    losses = [
        {row.step: loss for row in run.history.kept if math.isfinite(loss := row.figures.get("train/loss", math.nan))}
        for run in (one, other)
    ]
    if common := sorted(losses[0].keys() & losses[1].keys()):
        step = common[-1]
        mine, others = (by_step[step] for by_step in losses)
        sentence += f"; at step {step:,}, the last that both tell of, the losses are {said.digits(mine)} and "
        sentence += f"{said.digits(others)}"
    return sentence + "."


def _settings(one: Run, other: Run) -> Section:
    from paceline.train.resume import flat

    if one.config is None or other.config is None:
        return Section("settings", "Settings", "The settings of one of the runs at least cannot be read.", Html(""))
    mine, others = flat(one.config.to_dict()), flat(other.config.to_dict())
    rows = [
        (name, _text(mine.get(name)), _text(others.get(name)))
        for name in mine
        if name not in _OF_EVERY_RUN and mine[name] != others.get(name)
    ]
    if one.world_size != other.world_size:
        rows.insert(0, ("ranks", str(one.world_size), str(other.world_size)))
    if not rows:
        return Section("settings", "Settings", "The runs have the same settings.", Html(""))
    sentence = f"The runs differ in {said.count(len(rows), 'setting')}."
    return Section("settings", "Settings", sentence, table("What differs", ("", one.name, other.name), rows))


def _steps(one: Run, other: Run) -> Section:
    """Where a step's time goes, on average over ranks and recorded steps."""
    rows, spent = [], []
    for run in (one, other):
        if times := mean_times(run.steps):
            each = [parts_of(times_of_rank) for times_of_rank in times]
            spent.append((run.name, {name: statistics.fmean(parts[name] for parts in each) for name, _ in PARTS}))
    longest = max((sum(parts.values()) for _, parts in spent), default=0.0)
    if len(spent) < 2 or longest <= 0:
        return Section("steps", "A step", "Events of steps were not recorded of both runs.", Html(""))
    for name, parts in spent:
        told = ", ".join(f"{words} {said.seconds(parts[part])}" for part, words in PARTS)
        drawn = bar([(f"time-{part}", parts[part] / longest) for part, _ in PARTS], f"{name}: {told}")
        rows.append((name, drawn, said.seconds(sum(parts.values())), *(said.seconds(parts[part]) for part, _ in PARTS)))
    (_, mine), (_, others) = spent
    most, words = max(PARTS, key=lambda item: abs(others[item[0]] - mine[item[0]]))
    sentence = (
        f"Between a step of {one.name} and one of {other.name} what differs most is {words}: "
        f"{said.seconds(mine[most])} and {said.seconds(others[most])} a rank."
    )
    heads: tuple[str, ...] = ("Run", "Where the time goes", "All", *(words for _, words in PARTS))
    keys = [tag("li", tag("span", class_=f"key time-{name}"), words) for name, words in PARTS]
    body = [table("A step, on average over ranks and recorded steps", heads, rows), tag("ul", *keys, class_="keys")]
    return Section("steps", "A step", sentence, join(body))


def _curves(one: Run, other: Run) -> Section:
    charts = compared_charts((one, other))
    if not charts["charts"]:
        return Section("curves", "Over the steps", "There are no figures over steps.", Html(""))
    sentence = f"The solid line is {one.name}, the dashed one {other.name}."
    return Section("curves", "Over the steps", sentence, draw(charts))


def _ratio(one: float | None, other: float | None) -> str:
    return "–" if one is None or other is None or one == 0 else said.digits(other / one)


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)
