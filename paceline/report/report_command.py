"""`paceline report`: a run as one page."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.command_line.options import Value
from paceline.command_line.parse import parse


@dataclass(frozen=True)
class ReportArguments:
    """Writes a page that shows where a run's time went; it needs no network, and opens from the file."""

    run: Annotated[str, Value("RUN", positional=True)]
    """The run's folder, such as runs/latest."""
    out: Annotated[str, Value("FILE")] = ""
    """The file to write. Without it: report.html in the run's folder."""
    open: bool = False
    """Open the page in the browser."""


def main(arguments: Sequence[str]) -> int:
    """Writes the page and says where; returns the exit status.

    Raises:
        UserError: There is no such run.
    """
    options = parse(ReportArguments, arguments, "paceline report")
    from paceline.report.page import write_page
    from paceline.report.run import read_run
    from paceline.train.run_folder import find_run

    run = read_run(find_run(options.run))
    out = Path(options.out).expanduser() if options.out else run.path / "report.html"
    write_page(run, out)
    print(f"{out}: open it in a browser")
    for problem in run.problems:
        print(f"note: {problem}")
    if options.open:
        webbrowser.open(out.resolve().as_uri())
    return 0
