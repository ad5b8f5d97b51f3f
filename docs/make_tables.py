"""Writes the tables of docs/benchmarks.md and README.md from docs/results/*.json: python docs/make_tables.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent


def results(name: str) -> dict[str, Any]:
    """One benchmark's file."""
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def strategies(rows: list[dict[str, Any]]) -> str:
    """One table over all cases: a line per system, time and ratio per case."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = [
        "| system | " + " | ".join(f"{case}, ms | ratio" for case in cases) + " |",
        "|---|" + "---:|---:|" * len(cases),
    ]
    for system, setting in dict.fromkeys((row["system"], row["setting"]) for row in rows):
        cells = []
        for case in cases:
            (row,) = [r for r in rows if (r["case"], r["system"], r["setting"]) == (case, system, setting)]
            cells += [f"{row['median_ms']:.1f} ± {row['spread_ms']:.1f}", _ratio(row)]
        lines.append(f"| {system}: {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> str:
    """A line per system worth a newcomer's look, a ratio per case."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    best = min((r for r in rows if r["system"] == "torch DDP"), key=lambda row: (row["ratio"], row["ratio_spread"]))
    chosen = [
        ("one process", "no communication"),
        ("torch DDP", best["setting"]),
        ("paceline", "manual"),
        ("paceline", "parameter server"),
        ("paceline", "per parameter, overlapped"),
        ("paceline", "buckets, overlapped"),
    ]
    lines = ["| system | " + " | ".join(cases) + " |", "|---|" + "---:|" * len(cases)]
    for name in chosen:
        cells = [_ratio(r) for case in cases for r in rows if (r["case"], r["system"], r["setting"]) == (case, *name)]
        lines.append(f"| {name[0]}: {name[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plain(rows: list[dict[str, Any]]) -> str:
    """A line per row."""
    lines = ["| case | system | ms | ratio |", "|---|---|---:|---:|"]
    for row in rows:
        time = f"{row['median_ms']:.1f} ± {row['spread_ms']:.1f}"
        lines.append(f"| {row['case']} | {row['system']}, {row['setting']} | {time} | {_ratio(row)} |")
    return "\n".join(lines)


def events(figures: dict[str, float]) -> str:
    """One sentence."""
    return (
        f"The tiny preset on two ranks records {figures['ops_per_step']:.0f} ops in a step of "
        f"{figures['step_seconds'] * 1e3:.1f} ms, at {figures['seconds_per_op'] * 1e6:.1f} us each: "
        f"{figures['share_of_step']:.2%} of the step."
    )


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.3f} ± {row['ratio_spread']:.3f}"


def replace(page: str, name: str, text: str) -> str:
    """Puts `text` between a table's two marks."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.S)
    assert marked.search(page), name
    return marked.sub(lambda match: match[1] + text + match[2], page)


if __name__ == "__main__":
    path = DOCS / "benchmarks.md"
    page = path.read_text()
    page = replace(page, "strategies", strategies(results("strategies")["rows"]))
    page = replace(page, "trainer", plain(results("trainer")["rows"]))
    page = replace(page, "model", plain(results("model")["rows"]))
    page = replace(page, "events", events(results("events")["figures"]))
    path.write_text(page)
    readme = DOCS.parent / "README.md"
    readme.write_text(replace(readme.read_text(), "summary", summary(results("strategies")["rows"])))
