"""`paceline report`: a run, or two side by side, as one page."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from paceline.command_line.options import Value
from paceline.command_line.parse import parse
from paceline.core.errors import UserError


@dataclass(frozen=True)
class ReportArguments:
    """Writes a page that shows where a run's time went; it needs no network, and opens from the file."""

    run: Annotated[str, Value("RUN", positional=True)]
    """The run's folder, such as runs/latest."""
    other: Annotated[str, Value("OTHER", positional=True)] = ""
    """Another run, to be shown beside it."""
    out: Annotated[str, Value("FILE")] = ""
    """The file to write. Without it: report.html, or timeline.svg, in the run's folder; beside-OTHER.html for two."""
    format: Literal["html", "svg", "png"] = "html"
    """A page, or a figure of the timeline of its typical step, such as for a paper."""
    open: bool = False
    """Open the page in the browser."""


def main(arguments: Sequence[str]) -> int:
    """Writes the page and says where; returns the exit status.

    Raises:
        UserError: There is no such run; or of a figure: there are two, it has no events, or matplotlib is missing.
    """
    options = parse(ReportArguments, arguments, "paceline report")
    from paceline.report.comparison import told_apart
    from paceline.report.page import comparison_page, page, write_page
    from paceline.report.run import read_run
    from paceline.train.run_folder import find_run

    if options.format != "html":
        out = _draw(options)
        print(out)
        if options.open:
            webbrowser.open(out.resolve().as_uri())
        return 0
    runs = [read_run(find_run(name)) for name in (options.run, options.other) if name]
    name = f"beside-{runs[1].name}.html" if len(runs) > 1 else "report.html"
    if len(runs) > 1:
        runs = [*told_apart(*runs)]
    out = Path(options.out).expanduser() if options.out else runs[0].path / name
    write_page(comparison_page(runs) if len(runs) > 1 else page(runs[0]), out)
    print(f"{out}: open it in a browser")
    for run in runs:
        for problem in run.problems:
            print(f"note: {run.name}: {problem}" if len(runs) > 1 else f"note: {problem}")
    if options.open:
        webbrowser.open(out.resolve().as_uri())
    return 0


def _draw(options: ReportArguments) -> Path:
    """Writes a figure; returns the file."""
    from paceline.report.picture import draw
    from paceline.report.run import read_run
    from paceline.report.timeline import ranks_shown
    from paceline.train.run_folder import EVENTS, find_run

    if options.other:
        raise UserError("a figure is of one run, two were named: leave one out, or --format for the page of both")
    path = find_run(options.run, EVENTS)
    out = Path(options.out).expanduser() if options.out else path / f"timeline.{options.format}"
    if out.suffix != f".{options.format}":
        raise UserError(f"--out {out} does not end in .{options.format}, as --format says: change one of them")
    run = read_run(path)
    if run.typical is None:
        raise UserError(
            f"{path} holds no events of steps: log.events-every says in which they are recorded; 0 is in none"
        )
    shown = set(ranks_shown(run))
    draw([event for event in run.typical.events if event.rank in shown], out)
    return out
