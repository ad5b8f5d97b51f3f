"""A run as one page of HTML that needs no network: markup, style, scripts and values in one file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from paceline.core.errors import UserError
from paceline.report.communication import communication
from paceline.report.comparison import comparison
from paceline.report.curves import curves
from paceline.report.html import Html, Section, join, tag
from paceline.report.memory import memory
from paceline.report.rank_times import ranks
from paceline.report.run import Run
from paceline.report.summary import summary
from paceline.report.synchronisation import synchronisation
from paceline.report.timeline import timeline
from paceline.report.what_if_section import what_if

_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = (
    *("uPlot.min.js", "drawing.js", "timeline_picture.js", "timeline.js", "charts.js"),
    *("simulate.js", "what_if.js", "player.js", "numbers.js", "holdings.js"),
)


def page(run: Run, note: str = "") -> str:
    """The page of a run.

    Args:
        run: The run.
        note: What else its head says.
    """
    sections = [
        *(summary(run), timeline(run), synchronisation(run), communication(run)),
        *(memory(run), curves(run), ranks(run), what_if(run)),
    ]
    head = [tag("p", text) for text in (_where(run), note) if text]
    return _document(run.name, head, sections, _problems(run))


def comparison_page(runs: Sequence[Run]) -> str:
    """The page of two runs side by side."""
    where = [tag("p", f"{run.name}: {_where(run)}") for run in runs]
    problems = [join([tag("p", run.name, class_="note"), _problems(run)]) for run in runs if run.problems]
    return _document(" and ".join(run.name for run in runs), where, comparison(*runs), join(problems))


def _document(title: str, where: Sequence[Html], sections: Sequence[Section], problems: Html) -> str:
    scripts = [_file(name) for name in _SCRIPTS]
    # Only these scripts run, whatever else comes to stand in the page; and nothing is fetched.
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = [
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", f"{title}: paceline report"),
        Html(f"<!-- uPlot, which draws the charts:\n\n{_file('uPlot.LICENSE')}-->"),
        *(Html(f"<style>{_file(name)}</style>") for name in _STYLES),
    ]
    body = [
        tag("a", "Skip to the sections", href="#main", class_="skip"),
        tag("header", tag("h1", title), *where, _links(sections)),
        problems,
        tag("main", *(section.html() for section in sections), id="main"),
        *(Html(f"<script>{script}</script>") for script in scripts),
    ]
    return f'<!doctype html>\n<html lang="en"><head>{join(head)}</head><body>{join(body)}</body></html>\n'


def write_page(text: str, out: Path) -> None:
    """Writes a page.

    Raises:
        UserError: It cannot be written.
    """
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; choose another file with --out") from None


def _file(name: str) -> str:
    return files("paceline.report").joinpath("web", name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _where(run: Run) -> str:
    facts, config = run.facts, run.config
    program = run.program if run.is_own_loop else None
    hosts = -(-run.world_size // facts.ranks_per_host) if facts.ranks_per_host else 1
    parts = [
        f"{run.world_size} rank{'s' * (run.world_size > 1)}" + (f" on {hosts} hosts" if hosts > 1 else ""),
        f"model {config.model.preset}, zero {config.strategy.stage}" if config is not None else "",
        f"zero {program.schedule.strategy.stage}" if program is not None else "",
        ", ".join(dict.fromkeys(facts.gpus)) or facts.processor,
        f"torch {facts.versions['torch']}" if facts.versions.get("torch") else "",
        f"on {facts.host}" if facts.host else "",
        f"started {facts.started}" if facts.started else "",
    ]
    return " · ".join(part for part in parts if part)


def _links(sections: Sequence[Section]) -> Html:
    return tag("nav", *(tag("a", each.title, href=f"#{each.name}") for each in sections), aria_label="Sections")


def _problems(run: Run) -> Html:
    if not run.problems:
        return Html("")
    listed = [tag("li", problem) for problem in run.problems]
    return tag("aside", tag("h2", "What is missing"), tag("ul", *listed), class_="problems")
