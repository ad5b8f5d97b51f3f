"""Events of one step as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.events import Event
from paceline.core.ops import COMPUTE, STREAMS

COLOURS = {
    "forward": ("#7aa6d6", "forward"),
    "backward": ("#3b6ea8", "backward"),
    "update": ("#8d7bb8", "update"),
    "other": ("#c9b458", "copying, adding up"),
    "hidden": ("#7bb58a", "communication, hidden"),
    "exposed": ("#d0573f", "communication that a rank waits for"),
}
"""Colour and name in the legend of what is drawn."""
ROWS = {
    "compute": "compute",
    "gather": "gather parameters",
    "reduce": "reduce gradients",
    "replicate": "add up over groups",
    "statistics": "sum losses and norms",
}
"""What a stream is called."""
NARROWEST = 0.0025
"""Of the width: what takes less would not be seen."""


def draw(events: Sequence[Event], out: Path) -> None:
    """Draws the timeline of one step, one row per rank and stream.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib.figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UserError("a picture needs matplotlib: pip install 'paceline[plot]', or write a .json trace") from error
    origin = min(event.start for event in events)
    span = max(event.end for event in events) - origin
    ranks = sorted({event.rank for event in events})
    used = {(event.rank, event.stream) for event in events}
    rows: list[tuple[int, str]] = [(rank, stream) for rank in ranks for stream in STREAMS if (rank, stream) in used]
    figure = matplotlib.figure.Figure(figsize=(12, 0.7 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    drawn: set[str] = set()
    for event in sorted(events, key=lambda event: event.seconds, reverse=True):
        row, start = rows.index((event.rank, event.stream)), (event.start - origin) * 1e3
        width = max(event.seconds, NARROWEST * span) * 1e3
        seen = min(event.exposed * 1e3, width)
        # A gap of white between ops, but never so wide that it hides a short one.
        edge = 0.5 if event.seconds > 0.01 * span else 0.0
        for kind, left, long in ((_kind(event), start, width), ("exposed", start + width - seen, seen)):
            if long > 0:
                drawn.add(kind)
                axes.barh(row, long, left=left, height=0.8, color=COLOURS[kind][0], edgecolor="white", linewidth=edge)
        if event.seconds > 0.045 * span:
            middle = start + width / 2
            text = axes.text(middle, row, event.target, ha="center", va="center", fontsize=7, color="white")
            text.set_clip_on(True)
            # A name with two dollars is no formula.
            text.set_parse_math(False)
    axes.set_yticks(range(len(rows)), [f"rank {rank}: {ROWS[stream]}" for rank, stream in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for rank_row in (row for row in range(1, len(rows)) if rows[row][0] != rows[row - 1][0]):
        axes.axhline(rank_row - 0.5, color="#cccccc", linewidth=0.8)
    axes.set_xlim(0, span * 1e3 * (1 + NARROWEST))
    axes.set_xlabel(f"milliseconds of step {events[0].step + 1:,}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(
        handles=[Patch(color=colour, label=label) for kind, (colour, label) in COLOURS.items() if kind in drawn],
        loc="outside upper center",
        ncols=len(COLOURS),
        frameon=False,
        fontsize=8,
    )
    try:
        figure.savefig(out, dpi=130)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; choose another file with --out") from None


def _kind(event: Event) -> str:
    if event.kind not in COMPUTE:
        return "hidden"
    return event.kind if event.kind in COLOURS else "other"
