"""Makes the pictures in docs/images.

Those of the strategies are simulated, from the schedules that the engine executes:

python docs/make_pictures.py

The others show a real run, its page by Debian's Chromium:

paceline train --workers 2 --folder runs/readme > runs/readme.log
paceline train --workers 2 --model.preset small --micro-batch 8 --strategy.bucket-mb 4 --steps 20 \\
    --folder runs/timeline
python docs/make_pictures.py runs/readme.log runs/timeline
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.figure
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from paceline.core.build_layout import build_layout
from paceline.core.build_schedule import build_schedule
from paceline.core.events import Event
from paceline.core.layout import ParameterSpec
from paceline.core.ops import Op
from paceline.core.schedule import Schedule
from paceline.core.simulate import simulate
from paceline.core.strategy import Strategy
from paceline.report.page import page, write_page
from paceline.report.run import read_run
from paceline.report.trace import recorded_step, write_trace

IMAGES = Path(__file__).parent / "images"
COLUMNS = 150
ROWS_PER_INCH = 6.0

STAGES = {
    "zero 0: nothing is sharded": Strategy(),
    "zero 1: optimizer states are sharded": Strategy(zero=1),
    "zero 2: so are gradients, whole only for two units at a time": Strategy(zero=2),
    "zero 3: so are parameters, whole only for two units at a time": Strategy(zero=3),
    "zero 3, shard 4: the same in two groups of 4 ranks, which add their gradients up": Strategy(zero=3, shard=4),
}
POLICIES = {
    f"accumulation {policy}: {what}": Strategy(zero=3, accumulation=policy)
    for policy, what in (
        ("each", "gradients are reduced in every micro-batch"),
        ("hold", "parameters stay gathered for the whole step"),
        ("defer", "whole gradients add up, and are reduced in the last micro-batch"),
    )
}

PICTURES = {"strategy-stages.png": (STAGES, 1), "strategy-accumulation.png": (POLICIES, 2)}
"""Which strategies each shows, and micro-batches of the step."""

RANKS = 8
UNITS = ("1", "2", "3", "4")
UNIT_NUMEL = 8_000_000
"""Parameters of a unit: more than fit in a bucket, so that every unit has its own."""
COMPUTING = {"forward": 1.0, "backward": 2.0, "update": 1.2}
"""Milliseconds: of a unit, and of a whole update."""
BYTES_PER_MS = 35e6

KINDS = {
    "forward": ("#7aa6d6", "forward"),
    "backward": ("#3b6ea8", "backward"),
    "update": ("#8d7bb8", "update"),
    "all_gather": ("#6aa67c", "all-gather of parameters"),
    "reduce_scatter": ("#dd9a45", "reduce-scatter of gradients"),
    "all_reduce": ("#b8673a", "all-reduce of gradients"),
}
"""Colour and name in the legend."""
WAIT = "#f1c9c1"


def example(strategy: Strategy) -> Schedule:
    """The schedule of a small model: four equal units, eight ranks."""
    parameters = [ParameterSpec(f"{unit}.w", (UNIT_NUMEL,), (1,), "float32", 4, unit) for unit in UNITS]
    return build_schedule(build_layout(parameters, UNITS, strategy, RANKS), strategy, RANKS, rank=0, order=UNITS)


def events_of_a_step(schedule: Schedule, micro_batches: int) -> tuple[list[Event], float, float]:
    """What runs between two updates, and from when to when: collectives that follow an update lie in the next step."""

    def cost(op: Op) -> float:
        if op.kind == "update":
            return COMPUTING["update"] / schedule.shards
        return COMPUTING.get(op.kind, op.sent / BYTES_PER_MS)

    events = simulate(schedule, cost, micro_batches, steps=3)
    start, end = (max(e.end for e in events if e.kind == "update" and e.step == step) for step in (0, 1))
    return [e for e in events if e.kind in KINDS and e.end > e.start and start <= e.start < end], start, end


def fingerprint(chosen: Mapping[str, Strategy], micro_batches: int) -> str:
    """Tells whether a picture is of the schedules as they are; written into the picture."""
    drawn = [(title, events_of_a_step(example(strategy), micro_batches)[0]) for title, strategy in chosen.items()]
    seen = [(title, e.kind, e.target, f"{e.start:.6f}", f"{e.end:.6f}") for title, events in drawn for e in events]
    return hashlib.blake2b(repr(seen).encode(), digest_size=8).hexdigest()


def draw_schedules(chosen: Mapping[str, Strategy], micro_batches: int, out: Path) -> None:
    """Draws one step of each strategy, one below the other, on one axis of time."""
    steps = {title: events_of_a_step(example(strategy), micro_batches) for title, strategy in chosen.items()}
    streams = {title: _streams(events) for title, (events, _, _) in steps.items()}
    heights = [len(rows) for rows in streams.values()]
    inches = 0.4 + 0.33 * len(heights) + 0.24 * sum(heights)
    figure = matplotlib.figure.Figure(figsize=(8.6, inches), layout="constrained")
    figure.get_layout_engine().set(hspace=0, h_pad=0.05)
    panels = figure.subplots(len(steps), squeeze=False, height_ratios=heights, sharex=True)[:, 0]
    kinds = {event.kind for events, _, _ in steps.values() for event in events}
    for axes, (title, (events, start, end)) in zip(panels, steps.items(), strict=True):
        _draw_panel(axes, title, streams[title], events, start, end)
    longest = max(end - start for _, start, end in steps.values())
    # An update at the end is as wide as its edge and needs a little more.
    panels[0].set_xlim(0, 1.006 * longest)
    panels[-1].set_xlabel("time of one step", loc="right", fontsize=7, labelpad=1)
    handles = [Patch(color=colour, label=label) for kind, (colour, label) in KINDS.items() if kind in kinds]
    figure.legend(
        handles=[*handles, Patch(color=WAIT, label="waiting")],
        loc="outside upper center",
        ncols=len(handles) + 1,
        frameon=False,
        fontsize=6.5,
        handlelength=1.2,
        columnspacing=1.2,
    )
    figure.savefig(out, dpi=140, metadata={"Schedules": fingerprint(chosen, micro_batches)})


def _streams(events: Sequence[Event]) -> list[str]:
    return [s for s in ("compute", "gather", "reduce", "replicate") if any(e.stream == s for e in events)]


def _draw_panel(
    axes: Axes, title: str, streams: Sequence[str], events: Sequence[Event], start: float, end: float
) -> None:
    axes.barh(0, end - start, left=0, height=0.8, color=WAIT, linewidth=0)
    unit_of = {f"bucket {index}": unit for index, unit in enumerate(reversed(UNITS))}
    for event in events:
        row, left = streams.index(event.stream), event.start - start
        colour, _ = KINDS[event.kind]
        axes.barh(row, event.seconds, left=left, height=0.8, color=colour, edgecolor="white", linewidth=0.6)
        unit = unit_of.get(event.target, event.target)
        if unit in UNITS:
            middle = left + event.seconds / 2
            axes.text(middle, row + 0.03, unit, ha="center", va="center", fontsize=6.5, color="white")
    axes.set_title(title, loc="left", fontsize=7.5, pad=2)
    axes.set_yticks(range(len(streams)), streams, fontsize=7)
    axes.set_ylim(len(streams) - 0.5, -0.5)
    axes.tick_params(length=0, labelbottom=False)
    for side in axes.spines.values():
        side.set_visible(False)


def draw_terminal(text: str, out: Path) -> None:
    """Draws lines of text as a terminal would show them."""
    lines = [line[:COLUMNS] for line in text.splitlines()]
    width, height = COLUMNS / 14.5, (len(lines) + 2) / ROWS_PER_INCH
    figure = matplotlib.figure.Figure(figsize=(width, height), facecolor="#1c1f24")
    for row, line in enumerate(lines):
        colour = "#7fd18b" if line.startswith("$") else "#e8e6e3"
        y = 1 - (row + 1.5) / (len(lines) + 2)
        figure.text(0.012, y, line, color=colour, family="DejaVu Sans Mono", fontsize=7.6, parse_math=False)
    figure.savefig(out, dpi=130, facecolor=figure.get_facecolor())


def shorten(log: str) -> str:
    """The log with the middle of its steps left out, and what only this machine's state has to do with."""
    lines = [re.sub(r", in /.*", "", line) for line in log.splitlines() if not line.startswith("note: ")]
    steps = [index for index, line in enumerate(lines) if line.startswith(("step", "validation at"))]
    kept = [*lines[: steps[3]], "...", *lines[steps[-3] :]]
    return "\n".join(["$ make train", *kept])


def photograph(run: Path, out: Path) -> None:
    """The upper part of a run's page, as Chromium shows it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        write_page(page(read_run(run)), file)
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-background-networking",
            "--window-size=1280,1010",
            f"--user-data-dir={folder}/own",
            f"--screenshot={out.resolve()}",
        ]
        subprocess.run(["chromium", *flags, file.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    for name, (chosen, micro_batches) in PICTURES.items():
        draw_schedules(chosen, micro_batches, IMAGES / name)
    if len(sys.argv) > 1:
        log, run = map(Path, sys.argv[1:])
        draw_terminal(shorten(log.read_text()), IMAGES / "terminal.png")
        write_trace(recorded_step(run, None, []), IMAGES / "timeline.png")
        photograph(run, IMAGES / "report.png")
