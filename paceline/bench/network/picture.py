"""The picture of `paceline bench network`: what each system's step is made of, and the sweep of bucket sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.figure
from matplotlib.axes import Axes

from paceline.bench.network.rows import NetworkRow

COMPUTE, EXPOSED, WIRE = "#3b6ea8", "#d0573f", "#333333"


def draw(rows: Sequence[NetworkRow], out: Path) -> None:
    """Draws the experiments "systems" and "buckets", where they are there, side by side.

    Args:
        rows: Of any experiments.
        out: A .svg or .png.
    """
    systems = [row for row in rows if row.experiment == "systems"]
    buckets = [row for row in rows if row.experiment == "buckets"]
    panels = [(_bars, systems)] * bool(systems) + [(_sweep, buckets)] * bool(buckets)
    widths = [7.2 if panel is _bars else 5.2 for panel, _ in panels]
    figure = matplotlib.figure.Figure(figsize=(sum(widths), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for one, (panel, chosen) in zip(axes, panels, strict=True):
        panel(one, chosen)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    figure.savefig(out, dpi=130)


def _bars(axes: Axes, rows: Sequence[NetworkRow]) -> None:
    """A bar for each system, the earliest on top: computing, then what communication adds to it."""
    parallel = [row for row in rows if row.wire_ms]
    compute, wire = parallel[0].compute_ms, parallel[0].wire_ms
    names = [row.setting if row.system == "paceline" else row.system for row in parallel]
    exposed = [max(0.0, row.median_ms - compute) for row in parallel]
    places = range(len(parallel))
    axes.barh(places, compute, color=COMPUTE, height=0.66, label="computing alone")
    axes.barh(places, exposed, left=compute, color=EXPOSED, height=0.66, label="exposed communication")
    for place, row in enumerate(parallel):
        end = max(row.median_ms, compute)
        axes.plot([end - row.spread_ms, end + row.spread_ms], [place, place], color="black", linewidth=1)
        axes.text(end + row.spread_ms, place, f"  {row.median_ms:.0f} ms", va="center", fontsize=8)
    axes.axvline(wire, color=WIRE, linestyle=(0, (4, 2)), linewidth=1.4, label="the wire's least time")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * max(row.median_ms + row.spread_ms for row in parallel))
    axes.set_xlabel("milliseconds a step")
    axes.set_title(f"training step, {parallel[0].where}\n{parallel[0].case}", fontsize=9, loc="left")
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.45, -0.13), ncols=3)


def _sweep(axes: Axes, rows: Sequence[NetworkRow]) -> None:
    """Time of a step over the size of a bucket."""
    parallel = [row for row in rows if row.wire_ms]
    sizes = [float(row.setting.split()[0]) for row in parallel]
    times, spreads = [row.median_ms for row in parallel], [row.spread_ms for row in parallel]
    axes.errorbar(sizes, times, yerr=spreads, color=EXPOSED, marker="o", markersize=4, capsize=2, label="step")
    axes.axhline(parallel[0].compute_ms, color=COMPUTE, linewidth=1.4, label="computing alone")
    axes.axhline(parallel[0].wire_ms, color=WIRE, linestyle=(0, (4, 2)), linewidth=1.4, label="the wire's least time")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * max(time + spread for time, spread in zip(times, spreads, strict=True)))
    axes.set_xlabel("bucket in MiB")
    axes.set_ylabel("milliseconds a step")
    axes.set_title(f"buckets, overlapped\n{parallel[0].case}", fontsize=9, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.45, -0.13), ncols=3)
