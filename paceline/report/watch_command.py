"""`paceline watch`: a run as it goes on, in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline.command_line.options import Value
from paceline.command_line.parse import parse

if TYPE_CHECKING:
    from paceline.report.watched import State

LOOK_SECONDS = 1.0
"""Between two looks at the run's files, which may lie on a disk that hosts share."""


@dataclass(frozen=True)
class WatchArguments:
    """Shows a run as it goes on, from the files that it writes, until it has ended or Ctrl-C is pressed."""

    run: Annotated[str, Value("RUN", positional=True)]
    """The run's folder, such as runs/latest; it is waited for if it is not there yet."""


def main(arguments: Sequence[str]) -> int:
    """Shows the run until it has ended; returns the exit status."""
    options = parse(WatchArguments, arguments, "paceline watch")
    from paceline.report.watched import Watched

    run = Watched(Path(options.run).expanduser())
    with _screen(run) as show:
        while True:
            state = run.look()
            show(state)
            if state.has_ended:
                return 0
            time.sleep(LOOK_SECONDS)


def _screen(run: Any) -> AbstractContextManager[Callable[[State], None]]:
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
