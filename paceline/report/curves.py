"""The page's section on figures over steps: loss, norm, rates, with restarts, skipped steps and checkpoints marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.command_line import quantities as said
from paceline.report.history import Row
from paceline.report.html import Html, Section, data, join, table, tag
from paceline.report.run import Run

_CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss, nats per token", (("train/loss", "training"), ("val/loss", "held-out text"))),
    ("Gradient norm", (("train/grad_norm", "before clipping"),)),
    ("Learning rate", (("train/learning_rate", "learning rate"),)),
    ("Tokens per second, all ranks", (("perf/tokens_per_second", "tokens/s"),)),
    ("Seconds of a step", (("perf/step_seconds", "a step"), ("data/wait_seconds", "waiting for data"))),
    (
        "Share of the time",
        (("comm/exposed_fraction", "exposed communication"), ("perf/crowded_fraction", "others had the cores")),
    ),
)
"""Title of each chart, and its lines."""
_MOST_POINTS = 2000
_MOST_ROWS = 30


def curves(run: Run) -> Section:
    """The section; its charts are drawn by the page's scripts, from the values that `chart_data` gives them."""
    rows = run.history.kept
    if not rows:
        return Section("curves", "Over the steps", "There are no figures over steps yet.", Html(""))
    charts = chart_data(run)
    body = [
        draw(charts),
        *([] if run.is_own_loop else [tag("p", _marks(charts["marks"]), class_="note")]),
        tag("details", tag("summary", "The figures as a table"), _table(rows, run.history.validations)),
    ]
    return Section("curves", "Over the steps", _sentence(run), join(body))


def chart_data(run: Run) -> dict[str, Any]:
    """What the charts show: values by step, null where there are none; steps to mark."""
    rows = _thinned(run.history.kept)
    charts = []
    for title, lines in _CHARTS:
        named = {key: (run.history.validations if key.startswith("val/") else rows) for key, _ in lines}
        steps = sorted({row.step for key, each in named.items() for row in each if _is_there(row, key)})
        if not steps:
            continue
        charts.append(
            {
                "title": title,
                "steps": steps,
                "lines": [
                    {"name": label, "values": [_value(at.get(step)) for step in steps]}
                    for key, label in lines
                    if (at := {row.step: row.figures[key] for row in named[key] if _is_there(row, key)})
                ],
            }
        )
    restarts = [life.first for life in run.history.lives[1:]]
    return {
        "charts": charts,
        "marks": {"restart": restarts, "skipped": run.history.skipped, "checkpoint": list(run.checkpoints)},
    }


def compared_charts(runs: Sequence[Run]) -> dict[str, Any]:
    """The first line of each chart, of several runs."""
    charts = []
    for title, ((key, label), *more) in _CHARTS:
        values = [{r.step: r.figures[key] for r in _thinned(run.history.kept) if _is_there(r, key)} for run in runs]
        if steps := sorted({step for by_step in values for step in by_step}):
            lines = [
                {"name": run.name, "values": [_value(by_step.get(step)) for step in steps]}
                for run, by_step in zip(runs, values, strict=True)
                if by_step
            ]
            charts.append({"title": f"{title}: {label}" if more else title, "steps": steps, "lines": lines})
    return {"charts": charts, "marks": {"restart": [], "skipped": [], "checkpoint": []}}


def draw(charts: Mapping[str, Any], name: str = "charts") -> Html:
    """Places for charts, and under a name that no others have what their script draws there."""
    places = [
        tag("figure", tag("figcaption", chart["title"]), tag("div", class_="chart", data_chart=index, data_from=name))
        for index, chart in enumerate(charts["charts"])
    ]
    return join([tag("div", *places, class_="charts"), data(name, charts)])


def _sentence(run: Run) -> str:
    kept = [row for row in run.history.kept if _is_there(row, "train/loss")]
    if run.is_own_loop:
        return "How long recorded steps took, and exposed communication; a loop of your own keeps its losses itself."
    if not kept:
        return "No loss of the run is a number."
    first, last = kept[0], kept[-1]
    best = min(kept, key=lambda row: row.figures["train/loss"])
    if len(kept) == 1:
        only = said.digits(first.figures["train/loss"])
        return f"At step {first.step:,}, the only one that is told of, the loss was {only}."
    sentence = (
        f"From step {first.step:,} to {last.step:,} the loss went from {said.digits(first.figures['train/loss'])} to "
        f"{said.digits(last.figures['train/loss'])}"
    )
    if best.step != last.step:
        sentence += f"; it was least, {said.digits(best.figures['train/loss'])}, at step {best.step:,}"
    if restarts := len(run.history.lives) - 1:
        sentence += f"; the run was restarted {'once' if restarts == 1 else f'{restarts:,} times'}"
    if skipped := run.history.last_figure("train/skipped_steps"):
        sentence += f"; {said.count(skipped, 'step')} left out, as the gradient was not finite"
    return sentence + "."


def _marks(marks: Mapping[str, Sequence[int]]) -> str:
    words = {"restart": "R, a restart", "skipped": "S, steps left out", "checkpoint": "C, a checkpoint that is kept"}
    shown = [f"{words[name]} ({_listed(steps)})" for name, steps in marks.items() if steps]
    return f"Marked: {'; '.join(shown)}." if shown else "No step was left out, and the run was not restarted."


def _listed(steps: Sequence[int]) -> str:
    several = "steps" if len(steps) > 1 else "step"
    return f"{several} {', '.join(f'{step:,}' for step in steps[:8])}" + (" and others" if len(steps) > 8 else "")


def _table(rows: Sequence[Row], validations: Sequence[Row]) -> Html:
    keys = [
        (key, title if len(lines) == 1 else f"{title}: {label}") for title, lines in _CHARTS for key, label in lines
    ]
    every = sorted([*_thinned(rows, _MOST_ROWS), *_thinned(validations, _MOST_ROWS)], key=lambda row: row.step)
    used = [(key, label) for key, label in keys if any(_is_there(row, key) for row in every)]
    cells = [
        (f"{row.step:,}", *(said.digits(row.figures[key]) if _is_there(row, key) else "–" for key, _ in used))
        for row in every
    ]
    return table("Figures over the steps", ("Step", *(label for _, label in used)), cells)


def _thinned(rows: Sequence[Row], most: int = _MOST_POINTS) -> list[Row]:
    """At most so many rows, spread evenly, with the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[(len(rows) - 1) * part // (most - 1)] for part in range(most)]


def _is_there(row: Row, key: str) -> bool:
    return math.isfinite(row.figures.get(key, math.nan))


def _value(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.6g}")
