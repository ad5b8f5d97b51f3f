"""Makes the pictures in docs/images from a real run.

paceline train --workers 2 --folder runs/readme > runs/readme.log
paceline train --workers 2 --model.preset small --strategy.bucket_mb 4 --steps 20 --folder runs/timeline
python docs/make_pictures.py runs/readme.log runs/timeline
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib.figure

from paceline.trace import write_trace

IMAGES = Path(__file__).parent / "images"
COLUMNS = 150
ROWS_PER_INCH = 6.0


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
    """The log with the middle of its steps left out."""
    lines = [re.sub(r", in /.*", "", line) for line in log.splitlines()]
    steps = [index for index, line in enumerate(lines) if line.startswith(("step", "validation at"))]
    kept = [*lines[: steps[3]], "...", *lines[steps[-3] :]]
    return "\n".join(["$ make train", *kept])


if __name__ == "__main__":
    log, run = map(Path, sys.argv[1:])
    draw_terminal(shorten(log.read_text()), IMAGES / "terminal.png")
    write_trace(run, None, IMAGES / "timeline.png")
