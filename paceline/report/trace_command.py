"""`paceline trace`: one step of a run as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.command_line import json_file
from paceline.command_line.json_file import JsonFile
from paceline.command_line.options import Value
from paceline.command_line.parse import parse


@dataclass(frozen=True)
class TraceArguments:
    """Writes the events of one step as a trace: a track per rank and stream, arrows from ops to those that waited."""

    run: Annotated[str, Value("RUN", positional=True)]
    """The run's folder, such as runs/latest."""
    step: int | None = None
    """Which step, as log lines and the page count. Without it: the latest one whose events were written down."""
    out: Annotated[str, Value("FILE")] = ""
    """The file to write: .png or .svg for a picture, else a trace. Without it: trace.json in the run's folder."""
    json: JsonFile = ""
    """Where to write the trace; - prints it and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Writes the files and says what to do with them; returns the exit status.

    Raises:
        UserError: There is no such run, it recorded no such step, or a file cannot be written.
    """
    options = parse(TraceArguments, arguments, "paceline trace")
    from paceline.launch.screen import show
    from paceline.report.trace import chrome_trace, recorded_step, write_trace
    from paceline.train.run_folder import EVENTS, find_run

    run, problems = find_run(options.run, EVENTS), list[str]()
    step = recorded_step(run, options.step, problems)
    if options.json:
        json_file.write(options.json, chrome_trace(step.events, step.groups))
    if options.out or not options.json:
        out = Path(options.out).expanduser() if options.out else run / "trace.json"
        write_trace(step, out)
        if options.json != json_file.SCREEN:
            is_picture = out.suffix in (".png", ".svg")
            print(f"{out}" if is_picture else f"{out}: open it at https://ui.perfetto.dev or in chrome://tracing")
    show(*(f"note: {problem}" for problem in problems), warning=True)
    return 0
