"""The page that shows how wrong forecasts are: docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.plan.fitted import ERRORS, FITTED, Constants
from paceline.plan.footprint import FREE
from paceline.plan.published.accuracy import TRACED, Line, Result
from paceline.plan.published.validate import order


def page(result: Result) -> str:
    """The page, as Markdown."""
    lines = [*_INTRODUCTION, "", *_targets(result)]
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
    if result.traced:
        lines += ["", *_traced(result)]
    lines += ["", *_constants(), "", *_refused(result), "", *_LIMITS]
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


def _targets(result: Result) -> Iterator[str]:
    yield "| target | wanted | found | |"
    yield "|---|---|---|---|"
    for name, wanted in _TARGETS.items():
        lines = [
            *result.times.get(name, []),
            *result.memories.get(name, []),
            *(result.traced if name == TRACED else []),
        ]
        for rows, constants, figures in wanted:
            for each in lines:
                if rows in ("", each.rows) and each.constants.startswith(constants):
                    for figure, most in figures.items():
                        found = getattr(each.errors, figure)
                        said = "met" if found <= most else "missed"
                        of = f"{each.rows}, {each.constants}" if each in result.traced else each.rows
                        yield f"| `{name}`, {of}, {figure} | {most:.0%} | {found:.1%} | {said} |"
    for name in result.times:
        right, pairs = order(next(each.times for each in result.files if each.table.path.name == name))
        said = "met" if right == pairs else "missed"
        yield f"| `{name}`, pairs of a table in the measured order | all | {right / pairs:.1%} | {said} |"
    ran_out = sum(held.ran_out for each in result.files for _, held in each.memories)
    wrong = sum(len(each.wrongly_fits) for each in result.files)
    said = "missed" if wrong else "met" if ran_out else "no such row is published"
    yield f"| runs that ran out of memory said to fit | 0 | {wrong} of {ran_out} | {said} |"


def _traced(result: Result) -> Iterator[str]:
    yield from _TRACED
    yield ""
    yield from _table(result.traced, "by")
    yield ""
    yield from _UNLIKE
    yield ""
    rows = next(each.errors.rows for each in result.traced if each.rows == "all")
    yield f"All {rows} of these runs fitted, and {rows - result.unfit} are said to: the others filled their devices"
    yield f"with the largest micro-batch that fitted, where a plan leaves {FREE:.0%} free, and holds 8 bytes for each"
    yield "logit, as paceline's output layer does."


def _table(lines: Sequence[Line], differ_by: str = "constants from") -> list[str]:
    head = [f"| rows | number | {differ_by} | mean | median | p90 | largest |", "|---|---|---|---|---|---|---|"]
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


_LEFT_OUT = "all rows but this"
_TARGETS: dict[str, list[tuple[str, str, dict[str, float]]]] = {
    "llm_foundry.csv": [
        ("all", constants, {"mean": 0.06, "median": 0.04, "p90": 0.12})
        for constants in (f"{_LEFT_OUT} size", "a trace")
    ],
    "vtrain_a100.csv": [("", f"{_LEFT_OUT} width", {"mean": 0.10})],
    "megatron_golden_mem.csv": [("held between steps", "", {"mean": 0.02}), ("peak", "", {"mean": 0.05})],
}
"""Of files: which lines of their tables, and the most that figures of them should be."""

_TRACED = (
    "## As `paceline plan` forecasts",
    "",
    "The tables above are of formulas, which know tensor and pipeline ranks, too. A plan traces the model, and",
    "simulates the schedule that paceline's engine would execute: another way to the same, with the same constants.",
    "Rows of `llm_foundry.csv` that way, with the attention that they ran; a plan takes PyTorch's, of 1.8 to 1.9 times",
    "the rate:",
)
_UNLIKE = (
    "Where blocks are recomputed a plan is shorter than these runs by what they did not spare: the checkpoints of",
    "torch that paceline takes stop before a block's last matmul, a third of its forward.",
)

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
    "  Playbook measured 362 GB/s of an all-reduce's bus over 2 hosts and 33 over 64 in the median; the best runs of",
    "  nanotron there moved more, and on 64 hosts less than forecast.",
    "- Megatron's functional tests: kernels are deterministic, and a loss is logged in each step. Their times are",
    "  not among the errors above. Those of 7 billion parameters on A100 and H100 take 1.33 to 1.55 times as long as",
    "  forecast.",
    "- Other jobs on the network, clocks that power and heat hold down, and bad machines.",
    "- GPUs other than A100 and H100: nothing was fitted there. Datasheet, measured matmul ceiling and published rates",
    "  of attention make the difference; constants of matmuls, memory and waiting are taken to hold.",
)
