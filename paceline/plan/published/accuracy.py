"""Every table of errors, computed from the published files, and the page that shows them: docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.plan.fitted import ERRORS, FITTED, Constants
from paceline.plan.published.errors import Errors, errors
from paceline.plan.published.fit import at, balanced
from paceline.plan.published.model_states import tells_states
from paceline.plan.published.predict import Prediction
from paceline.plan.published.sets import FITTED_FILES, find_folder, fitted_samples, tables
from paceline.plan.published.table import Row
from paceline.plan.published.validate import Checked, baseline, check, order

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
    """

    files: tuple[Checked, ...]
    times: dict[str, list[Line]]
    others: dict[str, list[Line]]
    memories: dict[str, list[Line]]

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
            "constants": {
                field.name: {"value": getattr(FITTED, field.name), "error": getattr(ERRORS, field.name)}
                for field in fields(Constants)
            },
            "not_predicted": {
                each.table.path.name: [{"line": row.line, "reason": reason} for row, reason in each.refused]
                for each in self.files
            },
        }


def evaluate(published: str = "") -> Result:
    """Computes every error.

    Args:
        published: The folder of the published files; "" for the usual place.

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
    return Result(files, times, {name: lines for name, lines in others.items() if lines}, memories)


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


def page(result: Result) -> str:
    """The page, as Markdown."""
    lines = [*_INTRODUCTION]
    for name, of in result.times.items():
        lines += ["", f"## {_TITLES[name]}", "", *_table(of), "", _order_line(result, name)]
    if result.others:
        lines += ["", "## Files on which nothing is fitted", ""]
        for name, of in result.others.items():
            lines += [f"`{name}`:", "", *_table(of), "", _order_line(result, name), ""]
    if result.memories:
        lines += ["", "## Memory", ""]
        for name, of in result.memories.items():
            lines += [f"`{name}`, by formula, with nothing fitted:", "", *_table(of), ""]
    lines += ["", *_constants(), "", *_refused(result), "", *_LIMITS]
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


def _table(lines: Sequence[Line]) -> list[str]:
    head = ["| rows | number | constants from | mean | median | p90 | largest |", "|---|---|---|---|---|---|---|"]
    return head + [
        f"| {each.rows} | {each.errors.rows} | {each.constants} | {each.errors.mean:.1%} | {each.errors.median:.1%} | "
        f"{each.errors.p90:.1%} | {each.errors.worst:.1%} |"
        for each in lines
    ]


def _order_line(result: Result, name: str) -> str:
    (checked,) = (each for each in result.files if each.table.path.name == name)
    right, pairs = order(checked.times)
    if not pairs:
        return ""
    return (
        f"Of {pairs:,} pairs of rows of a table whose throughput differs by more than 2 %, {right / pairs:.1%} are "
        "forecast in the order in which they were measured."
    )


def _constants() -> list[str]:
    meanings = {}
    for line in (Constants.__doc__ or "").split("Attributes:")[-1].splitlines():
        name, colon, text = line.strip().partition(": ")
        if colon and name in Constants.__dataclass_fields__:
            meanings[name] = text
            last = name
        elif line.strip():
            meanings[last] += f" {line.strip()}"
    rows = [
        f"| `{name}` | {getattr(FITTED, name):.3g} | {getattr(ERRORS, name):.1g} | {text} |"
        for name, text in meanings.items()
    ]
    return [
        "## The constants",
        "",
        f"All {len(rows)} of them, fitted to both files at once by `python -m paceline.plan.published.fit`:",
        "",
        "| constant | value | standard error | meaning |",
        "|---|---|---|---|",
        *rows,
    ]


def _refused(result: Result) -> list[str]:
    found = [(each.table.path.name, row, reason) for each in result.files for row, reason in each.refused]
    if not found:
        return []
    reasons: dict[tuple[str, str], int] = {}
    for name, _, reason in found:
        reasons[name, reason] = reasons.get((name, reason), 0) + 1
    rows = [f"| `{name}` | {count} | {reason} |" for (name, reason), count in reasons.items()]
    return ["## Not predicted", "", "| file | rows | reason |", "|---|---|---|", *rows]


_TITLES = {
    "llm_foundry.csv": "LLM-Foundry: FSDP on A100 and H100",
    "vtrain_a100.csv": "vTrain: Megatron-DeepSpeed with tensor and pipeline ranks on A100",
}

_INTRODUCTION = (
    "# How wrong forecasts are",
    "",
    "`paceline plan --validate` computes this page from published measurements, with the costs that every forecast is",
    "made of. An error is the absolute value of predicted over measured, less 1. Rows count alike; runs that whoever",
    "collected them marked as suspect count too, unless a line says otherwise.",
    "",
    "Errors mean little alone. Many rows are easy: what one constant share of the peak (MFU) would give, the median of",
    "the other rows of a device and precision, is shown beside each table. Others publish of themselves: Calculon",
    "3.65 % on its own 8 rows, vTrain 8.37 % on one host and 14.73 % on several, with kernels that were profiled for",
    "each configuration. Here nothing is profiled, and no constant belongs to a row, a model or a table.",
    "",
    "Rows with tensor, pipeline or context ranks are predicted by formula: paceline's engine has none.",
)

_LIMITS = (
    "## What forecasts do not know",
    "",
    "- The version of a program. Identical configurations of LLM-Foundry differ by 1.5 % in the median and 14 % at",
    "  most between its software of May 2023 and the newest.",
    "- Memory that is nearly full: PyTorch's allocator then frees and asks anew. Rows of 13 billion parameters on 8",
    "  A100 with 40 GB take 10 % more than predicted, which may be that.",
    "- What a network gives at scale: 0.8 of its nominal rate is taken for any number of hosts. The Ultra-Scale",
    "  Playbook measured 362 GB/s of an all-reduce's bus over 2 hosts and 33 over 64; rows of nanotron, which ran",
    "  there, are predicted with those figures.",
    "- Megatron's functional tests: kernels are deterministic, and a loss is logged in each step. Their times are",
    "  not among the errors above. Those of 7 billion parameters on A100 and H100 take 1.33 to 1.55 times as long as",
    "  forecast.",
    "- Other jobs on the network, clocks that power and heat hold down, and bad machines.",
    "- GPUs other than A100 and H100: nothing was fitted there. Datasheet, measured matmul ceiling and published rates",
    "  of attention make the difference; constants of matmuls, memory and waiting are taken to hold.",
)
