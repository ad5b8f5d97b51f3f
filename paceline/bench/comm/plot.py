"""The chart of `paceline bench comm`: time over size, one panel for each collective, one line for each system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.figure
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from paceline.bench.comm.rows import CommRow, CopyRow
from paceline.bench.comm.sizes import size_text

PALETTES = (
    ("#0b3c6f", "#2368ad", "#4b93d1", "#2e8b8b", "#7a6fc0", "#8aa4c8"),
    ("#1f6b3a", "#3f9b58", "#74b13c", "#8f8f2a", "#2fa58b", "#a3b89a"),
)
"""Colours of the algorithms of a transport of ours: one family of hues for each transport."""
PEERS = ("#d9822b", "#b23a48", "#c45ab3", "#7d5a3c")
MARKERS = "osD^vP"
COPY = "#555555"
LABEL_FONT = 7.5
LABEL_INCHES = 0.135
"""Height of a line of labels."""
PANEL_INCHES = (6.2, 3.9)
LABELS_INCHES = 2.2

Line = tuple[str, list[int], list[float], dict[str, object]]
"""Label, bytes, microseconds, and how it is drawn."""


def draw(rows: Sequence[CommRow], copies: Sequence[CopyRow], out: Path) -> None:
    """Draws every collective that was measured.

    Args:
        rows: Of one dtype and number of ranks.
        copies: The copy bound, drawn next to an all-reduce, whose bound it is.
        out: A .svg or .png.
    """
    ops = list(dict.fromkeys(row.op for row in rows))
    styles = _styles(rows)
    width, height = PANEL_INCHES[0] + LABELS_INCHES, PANEL_INCHES[1] * len(ops)
    figure = matplotlib.figure.Figure(figsize=(width, height))
    for index, op in enumerate(ops):
        lines = _lines([row for row in rows if row.op == op], styles)
        if op == "all_reduce":
            bound = sorted((copy for copy in copies if copy.op == op), key=lambda copy: copy.bytes)
            dashes = {"color": COPY, "linestyle": (0, (4, 2)), "linewidth": 1.2}
            times = [copy.time_us for copy in bound]
            lines.append(("copying as many bytes", [copy.bytes for copy in bound], times, dashes))
        left, right = 0.62 / width, 1 - LABELS_INCHES / width
        bottom, top = (len(ops) - 1 - index + 0.135) / len(ops), (len(ops) - index - 0.085) / len(ops)
        axes = figure.add_axes((left, bottom, right - left, top - bottom))
        row = next(row for row in rows if row.op == op)
        _draw_panel(axes, f"{op}, {row.ranks} ranks, {row.dtype}", lines, (top - bottom) * height)
    figure.savefig(out, dpi=150)


def _styles(rows: Sequence[CommRow]) -> dict[tuple[str, str], dict[str, object]]:
    """Colour and marker of each system, the same in every panel."""
    styles: dict[tuple[str, str], dict[str, object]] = {}
    ours: list[str] = []
    peers: list[str] = []
    for row in rows:
        key = (row.transport, row.algorithm)
        if key in styles:
            continue
        if row.algorithm == "own":
            peers.append(row.transport)
            number = len(peers) - 1
            styles[key] = {"color": PEERS[number % len(PEERS)], "marker": "x", "linewidth": 1.3}
        else:
            if row.transport not in ours:
                ours.append(row.transport)
            palette = PALETTES[ours.index(row.transport) % len(PALETTES)]
            number = sum(transport == row.transport for transport, _ in styles)
            marker = MARKERS[number % len(MARKERS)]
            styles[key] = {"color": palette[number % len(palette)], "marker": marker, "linewidth": 1.5}
    return styles


def _lines(rows: Sequence[CommRow], styles: dict[tuple[str, str], dict[str, object]]) -> list[Line]:
    lines: list[Line] = []
    for key in dict.fromkeys((row.transport, row.algorithm) for row in rows):
        found = sorted((row for row in rows if (row.transport, row.algorithm) == key), key=lambda row: row.bytes)
        label = key[0] if key[1] == "own" else f"{key[0]}, {key[1]}"
        lines.append((label, [row.bytes for row in found], [row.time_us for row in found], styles[key]))
    return lines


def _draw_panel(axes: Axes, title: str, lines: Sequence[Line], inches: float) -> None:
    """One collective; each line's label stands at its right end, moved only as far as others need room."""
    sizes = sorted({size for _, found, _, _ in lines for size in found})
    for _, found, times, style in lines:
        axes.plot(found, times, markersize=3.2, **style)  # type: ignore[arg-type]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("size", loc="right", fontsize=8, labelpad=0)
    axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.08)
    axes.xaxis.set_major_locator(FixedLocator(sizes[:: max(1, len(sizes) // 9)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(int(value))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _time_text(value)))
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [float(to_axes.transform((found[-1], times[-1]))[1]) for _, found, times, _ in lines]
    places = spread(ends, LABEL_INCHES / inches, -0.12, 1.08)
    for (label, _, _, style), end, place in zip(lines, ends, places, strict=True):
        colour = str(style["color"])
        axes.plot(
            (1.0, 1.035, 1.045),
            (end, place, place),
            transform=axes.transAxes,
            color=colour,
            linewidth=0.6,
            clip_on=False,
        )
        axes.text(1.05, place, label, transform=axes.transAxes, color=colour, fontsize=LABEL_FONT, va="center")


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places at least `gap` apart and in the same order, from `low` to `high`, each as near as that allows to its own.

    Neighbours that are too near form a group that is centred on its members' mean; groups that then touch are joined.
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    groups: list[list[int]] = []

    def bottom(group: Sequence[int]) -> float:
        size = gap * (len(group) - 1)
        return max(min(sum(places[index] for index in group) / len(group) - size / 2, high - size), low)

    for index in order:
        groups.append([index])
        while len(groups) > 1 and bottom(groups[-1]) < bottom(groups[-2]) + gap * len(groups[-2]):
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = [0.0] * len(places)
    for group in groups:
        for number, index in enumerate(group):
            moved[index] = bottom(group) + gap * number
    return moved


def _time_text(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:g} {unit}"
    return f"{microseconds:g} us"
