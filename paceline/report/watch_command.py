"""`paceline watch`: a run as it goes on, in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paceline.command_line.options import Value
from paceline.command_line.parse import parse
from paceline.core.errors import UserError

if TYPE_CHECKING:
    from paceline.report.watched import State, Watched

LOOK_SECONDS = 1.0
"""Between two looks at the run's files, which may lie on a disk that hosts share."""


@dataclass(frozen=True)
class WatchArguments:
    """Shows a run as it goes on, from the files that it writes, until it has ended or Ctrl-C is pressed."""

    run: Annotated[str, Value("RUN", positional=True)]
    """The run's folder, such as runs/latest; it is waited for if it is not there yet."""
    web: bool = False
    """Serve the page of `paceline report` instead, to browsers of this host, and make it anew as the run goes on."""
    port: Annotated[int | None, Value("PORT")] = None
    """With --web: the port to serve at. Without it: one that is free."""


def main(arguments: Sequence[str]) -> int:
    """Shows the run until it has ended, or serves its page until it is stopped; returns the exit status.

    Raises:
        UserError: There is a file where a folder is expected, or the port cannot be had.
    """
    options = parse(WatchArguments, arguments, "paceline watch")
    if options.port is not None and not options.web:
        raise UserError("--port says where --web serves: add --web, or leave --port out")
    from paceline.report.watched import Watched

    run = Watched(Path(options.run).expanduser())
    if options.web:
        return _serve(run, options.port or 0)
    with _screen(run) as show:
        while True:
            state = run.look()
            show(state)
            if state.has_ended:
                return 0
            time.sleep(LOOK_SECONDS)


def _serve(run: Watched, port: int) -> int:
    from paceline.launch.screen import show
    from paceline.report.watch_page import LivePage, PageServer

    run.look()
    with PageServer(port, LivePage(run).get) as server:
        show(f"{server.address}: open it in a browser of this host; Ctrl-C ends it")
        server.serve_forever()
    return 0


def _screen(run: Watched) -> AbstractContextManager[Callable[[State], None]]:
    """What shows a state: a live view in a terminal, else a line for each that says something new."""
    from paceline.launch.screen import columns

    if columns(sys.stdout) is not None:
        try:
            from paceline.report.live_view import live_view
        except ImportError:
            # The lines say the same.
            pass
        else:
            return live_view(run)
    return nullcontext(_Lines())


class _Lines:
    """A line for each step that is told of, and for what is waited for."""

    def __init__(self) -> None:
        self._told: tuple[object, ...] = ()

    def __call__(self, state: State) -> None:
        from paceline.launch.screen import show

        silent = any(name == "silent for" for name, _ in state.items)
        what = (state.step, state.has_ended, silent, state.line() if state.step < 0 else "")
        if what != self._told:
            self._told = what
            show(state.line())
