"""Every table of errors, computed from the published files."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.core.errors import UserError
from paceline.plan.fitted import ERRORS, FITTED, LAUNCH, Constants
from paceline.plan.published.errors import Errors, errors
from paceline.plan.published.fit import at, balanced
from paceline.plan.published.model_states import tells_states
from paceline.plan.published.predict import Prediction, machines
from paceline.plan.published.sets import FITTED_FILES, find_folder, fitted_samples, tables
from paceline.plan.published.table import Row
from paceline.plan.published.traced import estimate
from paceline.plan.published.validate import Checked, baseline, check

TimedRow = tuple[Row, Prediction]


@dataclass(frozen=True)
class Line:
    """Errors of some rows, in one of the ways of looking at them.

    Attributes:
        rows: Which rows.
        constants: From which rows the constants came.
        errors: The figures.
    """

    rows: str
    constants: str
    errors: Errors


@dataclass(frozen=True)
class Result:
    """All that the page shows.

    Attributes:
        files: Every file with forecasts beside its rows.
        times: Errors of step times in the files that constants are fitted to, by file.
        others: The same of files on which nothing is fitted.
        memories: Errors of memory, by file.
        traced: Errors of step times as `paceline plan` forecasts them, by a trace and the engine's schedule.
        unfit: How many of those runs, all of which fitted, it says not to fit.
    """

    files: tuple[Checked, ...]
    times: dict[str, list[Line]]
    others: dict[str, list[Line]]
    memories: dict[str, list[Line]]
    traced: list[Line]
    unfit: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""

        def listed(of: dict[str, list[Line]]) -> dict[str, Any]:
            return {
                name: [{"rows": each.rows, "constants": each.constants, **each.errors.to_dict()} for each in lines]
                for name, lines in of.items()
            }

        return {
            "step_time": listed(self.times),
            "nothing_fitted": listed(self.others),
            "memory": listed(self.memories),
            "traced": {**listed({"step_time": self.traced}), "said_not_to_fit": self.unfit},
            "constants": {
                field.name: {"value": getattr(FITTED, field.name), "error": getattr(ERRORS, field.name)}
                for field in fields(Constants)
            },
            "not_predicted": {
                each.table.path.name: [{"line": row.line, "reason": reason} for row, reason in each.refused]
                for each in self.files
            },
        }


def evaluate(published: str = "", traces: bool = True) -> Result:
    """Computes every error.

    Args:
        published: The folder of the published files; "" for the usual place.
        traces: Whether those of traces too, which take longer than all others.

    Raises:
        UserError: It is not there.
    """
    folder = find_folder(published)
    files = tuple(check(table) for table in tables(folder))
    sets = fitted_samples(folder)
    found = at(FITTED, balanced(sets))
    times: dict[str, list[Line]] = {}
    start = 0
    for name, members in zip(FITTED_FILES, sets, strict=True):
        (checked,) = (each for each in files if each.table.path.name == name)
        span = slice(start, start + len(members))
        start = span.stop
        alone = found.held_out(range(len(found.samples)))[span]
        key: Callable[[Row], Hashable]
        if name == "llm_foundry.csv":
            key, left_out = (lambda row: row.text("model")), "all rows but this size of model's"
        else:
            key, left_out = (lambda row: row.text("width")), "all rows but this width of model's"
        groups: list[Hashable] = ["other"] * len(found.samples)
        groups[span] = [key(row) for row, _ in checked.times]
        # The other file stays in the fit whole: it is no fold of this one.
        sized = _folds(found.held_out, groups)[span]
        times[name] = _lines(name, checked.times, alone, sized, left_out)
    others = {each.table.path.name: _plain(each) for each in files if each.table.path.name not in FITTED_FILES}
    memories = {each.table.path.name: _memory(each) for each in files if each.memories}
    traced, unfit = traced_lines(next(each for each in files if each.table.path.name == TRACED)) if traces else ([], 0)
    return Result(files, times, {name: lines for name, lines in others.items() if lines}, memories, traced, unfit)


TRACED = "llm_foundry.csv"
"""The file whose runs paceline could have run."""


def traced_lines(checked: Checked) -> tuple[list[Line], int]:
    """Errors of rows as forecasts are made for a user, but with their attention; and how many are said not to fit."""
    found = []
    for _, each in checked.times:
        hardware = machines(each.described)
        # What is traced are single kernels.
        hardware = replace(hardware, kernels=replace(hardware.kernels, launch=LAUNCH))
        # Without those in 8 bits, which no strategy has.
        with suppress(UserError):
            found.append((each, estimate(each.described.run, hardware)))
    lines = []
    for label, again in (("nothing recomputed", (False,)), ("blocks recomputed", (True,)), ("all", (False, True))):
        members = [(each, forecast) for each, forecast in found if (each.described.run.recompute != "none") in again]
        traced = [forecast.seconds / each.measured - 1 for each, forecast in members]
        ways = (("a trace, and the engine's schedule", traced), ("formulas", [each.error for each, _ in members]))
        lines += [Line(label, way, figures) for way, of in ways if (figures := errors(of)) is not None]
    return lines, sum(not forecast.fits for _, forecast in found)


def _folds(held_out: Callable[[Sequence[Hashable]], list[float]], groups: Sequence[Hashable]) -> list[float]:
    return held_out([(index,) if group == "other" else group for index, group in enumerate(groups)])


def _lines(
    name: str, rows: Sequence[TimedRow], alone: Sequence[float], sized: Sequence[float], left_out: str
) -> list[Line]:
    lines = []
    every = list(range(len(rows)))
    for label, chosen in _parts(name, rows):
        kept = [index for index in every if chosen(rows[index][0])]
        for constants, of in (
            ("all rows", [rows[index][1].error for index in every]),
            ("all rows but this one", alone),
            (left_out, sized),
        ):
            if (found := errors([of[index] for index in kept])) is not None:
                lines.append(Line(label, constants, found))
        if (simple := baseline([rows[index] for index in kept])) is not None:
            lines.append(Line(label, "one MFU for a device and precision, of the others", simple))
    return lines


def _parts(name: str, rows: Sequence[TimedRow]) -> list[tuple[str, Callable[[Row], bool]]]:
    """Rows that are looked at together, with what they are."""
    if name == "vtrain_a100.csv":
        return [
            ("one host (vTrain itself: mean 8.37 %)", lambda row: row.text("table") == "single"),
            ("several hosts (vTrain itself: mean 14.73 %)", lambda row: row.text("table") == "multi"),
        ]
    parts: list[tuple[str, Callable[[Row], bool]]] = [
        ("all", lambda row: True),
        ("all but those marked suspect", lambda row: not row.text("suspect")),
    ]
    devices = sorted({row.text("gpu") for row, _ in rows})
    return [*parts, *((device, lambda row, device=device: row.text("gpu") == device) for device in devices)]


def _plain(checked: Checked) -> list[Line]:
    if (found := errors([each.error for _, each in checked.times])) is None:
        return []
    lines = [Line("all", "fitted to other files", found)]
    if (simple := baseline(checked.times)) is not None:
        lines.append(Line("all", "one MFU for a device and precision, of the others", simple))
    return lines


def _memory(checked: Checked) -> list[Line]:
    states = all(tells_states(row) for row, _ in checked.memories)
    found = (("model states" if states else "held between steps", checked.steady), ("peak", checked.peak))
    return [Line(label, "formula", of) for label, of in found if of is not None]
