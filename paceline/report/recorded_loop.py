"""`pl.report`: the page of what `pl.record` recorded of a user's own loop, which is read like a run's files."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.comm.control import all_gather_json
from paceline.comm.world import World, current_world
from paceline.core.errors import UserError
from paceline.core.events import Event, exposed_in_step
from paceline.executor.chunk_products import ChunkProducts, chunk_products
from paceline.report.facts import Facts
from paceline.report.history import RESUMED, Row
from paceline.report.html import escape
from paceline.report.page import page, write_page
from paceline.report.program import Program
from paceline.report.recording import Recorded
from paceline.report.run import Run, read_own_loop
from paceline.train.environment import environment_facts
from paceline.train.gradient_norms import norm_lines, product_lines
from paceline.train.metrics import peak_memory
from paceline.train.run_folder import CHUNK_PRODUCTS, EVENTS, GRADIENT_NORMS

_HEIGHT = 900
"""Of a page inside another one, in pixels."""
_LINKS = re.compile('<a [^>]*class="skip">.*?</a>|<nav .*?</nav>', re.S)
"""To the page's own sections."""


@dataclass(frozen=True)
class Report:
    """A page that was written; a notebook shows it in the cell that it is the last value of.

    Attributes:
        path: The file, on rank 0.
        html: What is in it; nothing on other ranks.
    """

    path: Path
    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        """The page as a frame of a notebook: its own policy holds there, and it can do nothing to the notebook."""
        frame = f'style="width:100%;height:{_HEIGHT}px;border:0" sandbox="allow-scripts" title="paceline report"'
        # In such a frame they would lead to the notebook's sections.
        inner = _LINKS.sub("", self.html, count=2)
        return f'<iframe srcdoc="{escape(inner)}" {frame}></iframe>' if self.html else ""


def report(events: Recorded, out: str | Path = "report.html") -> Report:
    """Writes a page of what was recorded of your own loop: where its steps' time went, and who came last.

    It is the page that `paceline report` writes of a run, without what a recording does not know, such as losses. A
    collective call: every rank gives its own events, and rank 0 writes.

    Args:
        events: Of `with pl.record(model) as events:`, when that has ended.
        out: The file.

    Returns:
        Where the page is. As the last value of a notebook's cell it is shown there.

    Raises:
        UserError: There are no events of whole steps, or the file cannot be written; on every rank.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(4, 2))
        >>> with pl.record(model) as events:
        ...     model(torch.ones(8, 4).to(pl.init().device)).square().mean().backward()
        >>> pl.report(events, out="linear.html")
        Report(path=...Path('linear.html'))
    """
    if not isinstance(events, Recorded):
        raise UserError(
            f"report: expected the events of `with pl.record(model) as events:`, got {type(events).__name__}"
        )
    world, path = current_world(), Path(out).expanduser()
    own = {
        "events": [event.to_dict() for event in events],
        "peak": peak_memory(world.device),
        "norms": None if events.norms is None else asdict(events.norms),
    }
    rows = all_gather_json(own, "pl.report")
    products = []
    if events.schedule is not None and all(row["norms"] is not None for row in rows):
        products = chunk_products(events.schedule, events.local_gradients)
    html, failure = "", ""
    if world.rank == 0:
        try:
            html = page(_run(events, rows, products, world))
            write_page(html, path)
        except Exception as error:
            # The others wait for what becomes of it.
            failure = str(error) if isinstance(error, UserError) else f"rank 0 failed: {error!r}"
            all_gather_json(failure, "pl.report's outcome")
            raise
    failures = all_gather_json(failure, "pl.report's outcome")
    if failures[0]:
        raise UserError(failures[0])
    return Report(path, html)


def _run(recorded: Recorded, rows: Sequence[dict[str, Any]], products: Sequence[ChunkProducts], world: World) -> Run:
    by_rank = [[Event.from_dict(values) for values in row["events"]] for row in rows]
    ran = [event for events in by_rank for event in events]
    if recorded.schedule is None or not ran:
        raise UserError(
            "report: no op was recorded. Call it after the block `with pl.record(model) as events:`, with steps inside"
        )
    batches = max(event.micro_batch for event in ran) + 1
    program = Program(replace(recorded.schedule, rank=0), max(1, batches), recorded.specs)
    facts = msgspec.convert(environment_facts(world, torch.get_num_threads()), Facts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, recorded.name)
        path.mkdir()
        _write(by_rank, path / EVENTS)
        _write_norms(recorded, rows, products, path)
        return read_own_loop(path, program, facts, _figures(by_rank, max(row["peak"] for row in rows)))


def _write(by_rank: Sequence[Sequence[Event]], path: Path) -> None:
    """Writes events as a run does: step by step, and rank by rank.

    What a step sends behind its update is still under way when a run writes it down, and delays the next step.
    """
    listed = [event for events in by_rank for event in events if event.phase != "update" or event.stream == "compute"]
    listed.sort(key=lambda event: (event.step, event.rank))
    path.write_text("".join(f"{json.dumps(event.to_dict())}\n" for event in listed), encoding="utf-8")


def _write_norms(
    recorded: Recorded, rows: Sequence[dict[str, Any]], products: Sequence[ChunkProducts], path: Path
) -> None:
    """Writes norms of the last step's gradients as a run does."""
    schedule, norms = recorded.schedule, [row["norms"] for row in rows]
    if schedule is None or not all(norms):
        return
    step = 1 + max((event.step for event in recorded if event.kind == "backward"), default=0)
    names = [slot.spec.name for slot in schedule.layout.slots]
    copies = schedule.holders
    lines = {
        GRADIENT_NORMS: norm_lines(step, norms, names, copies),
        CHUNK_PRODUCTS: product_lines(step, products, len(norms[0]["local"])),
    }
    for name, each in lines.items():
        (path / name).write_text("".join(f"{json.dumps(line)}\n" for line in each), encoding="utf-8")


def _figures(by_rank: Sequence[Sequence[Event]], peak: int) -> list[Row]:
    """The figures of each step that events tell, as rows of a run that went on with the first of them."""
    steps = sorted({event.step for events in by_rank for event in events})
    rows = [Row(steps[0], float("nan"), {RESUMED: float(steps[0])})]
    for step in steps:
        shares = [share for events in by_rank if (share := exposed_in_step(events, step)) is not None]
        ran = [[e for e in events if e.step == step and e.stream == "compute"] for events in by_rank]
        spans = [max(e.end for e in each) - min(e.start for e in each) for each in ran if each]
        if spans:
            told = {"perf/step_seconds": max(spans), "comm/exposed_fraction": sum(shares) / len(shares)}
            rows.append(Row(step + 1, float("nan"), {**told, "memory/peak_bytes": float(peak)}))
    return rows
