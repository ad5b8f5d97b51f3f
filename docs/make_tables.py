"""Writes the tables of the documentation: python docs/make_tables.py.

Those of benchmarks.md, README.md and tutorial.md come from docs/results/*.json, those of strategies.md from the
schedules, those of collectives.md from the plans, docs/results/comm.json and docs/results/network.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import collective_tables
import make_tutorial
import msgspec
import strategy_tables

from paceline.bench.plan_rows import PlanRow, lost_by_choice

DOCS = Path(__file__).parent


def results(name: str) -> dict[str, Any]:
    """One benchmark's file."""
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def strategies(rows: list[dict[str, Any]]) -> str:
    """A table for each group, number of ranks and precision, a line per system."""
    tables = []
    for key in dict.fromkeys(map(_table, rows)):
        chosen = [row for row in rows if _table(row) == key]
        group, ranks, precision = key
        title = f"{group[:1].upper()}{group[1:]}, {ranks} ranks, {precision}:\n\n" if group else ""
        cases = list(dict.fromkeys(row["case"] for row in chosen))
        lines = [
            "| system | " + " | ".join(f"{case}, ms | ratio | MiB" for case in cases) + " |",
            "|---|" + "---:|" * 3 * len(cases),
        ]
        for name in dict.fromkeys((row["system"], row["setting"]) for row in chosen):
            cells = []
            for case in cases:
                # A system that could not run in one case leaves its place empty.
                found = [r for r in chosen if (r["case"], r["system"], r["setting"]) == (case, *name)]
                cells += [_cells(row) for row in found] or ["| |"]
            lines.append(f"| {name[0]}: {name[1]} | " + " | ".join(cells) + " |")
        tables.append(title + "\n".join(lines))
    return "\n\n".join(tables)


def _table(row: dict[str, Any]) -> tuple[str, int, str]:
    return row.get("group", ""), row["ranks"], row.get("precision", "float32")


def _cells(row: dict[str, Any]) -> str:
    size = (row["peak_bytes"] - row.get("base_bytes", 0)) / 2**20
    return f"{row['median_ms']:.1f} ± {row['spread_ms']:.1f} | {_ratio(row)} | {size:.0f}"


def summary(rows: list[dict[str, Any]]) -> str:
    """A line per system worth a newcomer's look, a ratio per case: what shares nothing, in float32, on fewest ranks."""
    first = _table(rows[0])
    rows = [row for row in rows if _table(row) == first]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    best = min((r for r in rows if r["system"] == "torch DDP"), key=lambda row: (row["ratio"], row["ratio_spread"]))
    chosen = [
        ("one process", "no communication"),
        ("torch DDP", best["setting"]),
        ("paceline", "manual"),
        ("paceline", "parameter server"),
        ("paceline", "per parameter, overlapped"),
        ("paceline", "buckets, overlapped"),
        ("paceline", "zero 0"),
    ]
    lines = ["| system | " + " | ".join(cases) + " |", "|---|" + "---:|" * len(cases)]
    for name in chosen:
        found = {r["case"]: _ratio(r) for r in rows if (r["system"], r["setting"]) == name}
        if found:
            lines.append(f"| {name[0]}: {name[1]} | " + " | ".join(found.get(case, "") for case in cases) + " |")
    return "\n".join(lines)


def gpu(rows: list[dict[str, Any]]) -> str:
    """A line per model and system."""
    lines = [
        "| model | system | ms a step | host, ms | tokens/s | MFU | MiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        time = f"{row['median_ms']:.1f} ± {row['spread_ms']:.1f} | {row['host_ms']:.1f}"
        rest = f"{row['tokens_per_second']:,.0f} | {100 * row['mfu']:.1f} % | {row['peak_bytes'] / 2**20:,.0f}"
        lines.append(f"| {row['model']} | {row['system']}: {row['setting']} | {time} | {rest} |")
    return "\n".join(lines)


def plain(rows: list[dict[str, Any]]) -> str:
    """A line per row."""
    lines = ["| case | system | ms | ratio |", "|---|---|---:|---:|"]
    for row in rows:
        time = f"{row['median_ms']:.1f} ± {row['spread_ms']:.1f}"
        lines.append(f"| {row['case']} | {row['system']}, {row['setting']} | {time} | {_ratio(row)} |")
    return "\n".join(lines)


def collectives(rows: list[dict[str, Any]]) -> str:
    """A line per collective and size: each library's fastest, and paceline's time as a share of others'."""
    libraries = [name for name in dict.fromkeys(row["transport"] for row in rows) if name != "tcp"]
    lines = [
        "| collective | bytes | " + " | ".join(f"{name}, us" for name in libraries) + " | of the best MPI | of Gloo |",
        "|---|---:|" + "---:|" * (len(libraries) + 2),
    ]
    for op, size in dict.fromkeys((row["op"], row["bytes"]) for row in rows):
        best = {
            name: min((r for r in rows if (r["op"], r["bytes"], r["transport"]) == (op, size, name)), key=_time)
            for name in libraries
        }
        ours = _time(best["shared memory"])
        mpi = min(_time(row) for name, row in best.items() if "MPI" in name)
        cells = " | ".join(f"{_time(best[name]):,.1f} ± {best[name]['spread_us']:,.1f}" for name in libraries)
        lines.append(f"| {op} | {size:,} | {cells} | {ours / mpi:.2f} | {ours / _time(best['gloo']):.3f} |")
    return "\n".join(lines)


def _time(row: dict[str, Any]) -> float:
    return float(row["time_us"])


def network(rows: list[dict[str, Any]]) -> str:
    """A table for each experiment, a line per system."""
    tables = []
    for experiment in dict.fromkeys(row["experiment"] for row in rows):
        chosen = [row for row in rows if row["experiment"] == experiment]
        first = chosen[0]
        where = f"{first['hosts']} hosts, {first['ranks_per_host']} rank{'s' * (first['ranks_per_host'] > 1)} on each"
        lines = [
            f"**{experiment}**, {where}, {first['gbit']:.2f} Gbit/s:",
            "",
            "| case | system | ms | computing alone, ms | wire's least, ms | cores busy, ms | ratio | sent, MB |",
            "|---|---|---:|---:|---:|---:|---:|---:|",
        ]
        for row in chosen:
            time = f"{row['median_ms']:.1f} ± {row['spread_ms']:.1f}"
            alone = f"{row['compute_ms']:.0f}" if row["compute_ms"] else ""
            lines.append(
                f"| {row['case']} | {row['system']}: {row['setting']} | {time} | {alone} | {row['wire_ms']:.1f} | "
                f"{row['cores_ms']:.0f} | {_ratio(row)} | {row['sent_bytes'] / 1e6:.2f} |"
            )
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def overhead(figures: dict[str, float]) -> str:
    """A line per strategy, a column per number of ranks."""
    ranks = list(dict.fromkeys(name.rpartition(", ")[2] for name in figures))
    lines = [
        "| strategy | " + " | ".join(f"{count}, us a unit" for count in ranks) + " |",
        "|---|" + "---:|" * len(ranks),
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{figures[f'{name}, {count}']:.0f}" for count in ranks) + " |"
        for name in dict.fromkeys(name.rpartition(", ")[0] for name in figures)
    ]
    return "\n".join(lines)


def plans(result: dict[str, Any]) -> str:
    """A line per number of ranks, model and precision: errors of its settings, and what the planner's choice loses."""
    lines = [
        "| ranks | model | precision | steps, ms | step's error, mean | at most | allocated | process | choice loses |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows = result["rows"]
    for key in dict.fromkeys(map(_choice, rows)):
        chosen = [row for row in rows if _choice(row) == key]
        times = _errors(chosen, "predicted_ms", "measured_ms")
        held = _errors(chosen, "predicted_bytes", "allocated_bytes")
        whole = _errors(chosen, "predicted_process_bytes", "process_bytes")
        measured = [row["measured_ms"] for row in chosen]
        lost = lost_by_choice(msgspec.convert(chosen, list[PlanRow]))
        shares = " | ".join(f"{each:.1%}" for each in (mean(times), max(times), mean(held), mean(whole), lost))
        lines.append(f"| {' | '.join(map(str, key))} | {min(measured):.0f} to {max(measured):.0f} | {shares} |")
    return "\n".join(lines)


def _errors(rows: list[dict[str, Any]], predicted: str, measured: str) -> list[float]:
    return [abs(row[predicted] / row[measured] - 1) for row in rows]


def _choice(row: dict[str, Any]) -> tuple[int, str, str]:
    return row["ranks"], row["size"], row["precision"]


def events(figures: dict[str, float]) -> str:
    """One sentence."""
    return (
        f"The tiny preset on two ranks records {figures['ops_per_step']:.0f} ops in a step of "
        f"{figures['step_seconds'] * 1e3:.1f} ms, at {figures['seconds_per_op'] * 1e6:.1f} us each: "
        f"{figures['share_of_step']:.2%} of the step. In turn, two and two, those that are recorded take "
        f"{figures['on_to_off']:.4f} ± {figures['on_to_off_error']:.4f} of those that are not."
    )


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.3f} ± {row['ratio_spread']:.3f}"


def replace(page: str, name: str, text: str) -> str:
    """Puts `text` between a table's two marks."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.S)
    assert marked.search(page), name
    return marked.sub(lambda match: match[1] + text + match[2], page)


def pages() -> dict[Path, str]:
    """Every page with tables, its tables filled anew."""
    benchmarks = {
        "strategies": strategies(results("strategies")["rows"]),
        "bfloat16": strategies(results("strategies-bf16")["rows"]),
        "bfloat16-compute": strategies(results("strategies-bf16-compute")["rows"]),
        "four": strategies(results("strategies-4")["rows"]),
        "four-compute": strategies(results("strategies-4-compute")["rows"]),
        "collectives": collectives(results("comm")["rows"]),
        "network": network(results("network")["rows"]),
        "overhead": overhead(results("overhead")["figures"]),
        "trainer": plain(results("trainer")["rows"]),
        "model": plain(results("model")["rows"]),
        "events": events(results("events")["figures"]),
        "gpu": gpu(results("gpu")["rows"]),
        "gpu-compiled": gpu(results("gpu-compiled")["rows"]),
        "plans": plans(results("plan")),
    }
    measured = {
        "comm": collective_tables.measured(results("comm")),
        "hosts": collective_tables.between_hosts(results("network")),
    }
    tables = {
        DOCS / "benchmarks.md": benchmarks,
        DOCS.parent / "README.md": {"summary": summary(results("strategies")["rows"])},
        DOCS / "strategies.md": strategy_tables.tables(),
        DOCS / "collectives.md": collective_tables.tables() | measured,
        DOCS / "tutorial.md": make_tutorial.lines(results("tutorial")),
    }
    found = {}
    for path, texts in tables.items():
        found[path] = path.read_text()
        for name, text in texts.items():
            found[path] = replace(found[path], name, text)
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
