"""A run's state in a terminal, drawn anew in its place; needs rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.launch.screen import visible
from paceline.report.watched import State, Watched


@contextmanager
def live_view(run: Watched) -> Iterator[Callable[[State], None]]:
    """Inside, what it yields shows a state; the last one stays on the screen."""
    with Live(console=Console(), auto_refresh=False, transient=False) as live:

        def show(state: State) -> None:
            live.update(drawn(run, state), refresh=True)

        yield show


def drawn(run: Watched, state: State) -> Group:
    """A state as a bar and a table."""
    table = Table.grid(padding=(0, 2))
    for name, value in state.items:
        # What a run's files say is text, and no markup.
        table.add_row(Text(name, style="dim"), Text(visible(value)))
    parts = [Text(visible(str(run.path)), style="bold")]
    if state.step >= 0:
        return Group(*parts, ProgressBar(total=1.0, completed=min(1.0, state.share), width=40), table)
    return Group(*parts, table)
