"""Events of one step as a timeline: a Chrome/Perfetto trace, or a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.events import Event
from paceline.core.ops import STREAMS
from paceline.core.strategy import Strategy
from paceline.report.flows import flows
from paceline.report.lines import Damage
from paceline.report.meetings import Groups, groups_of
from paceline.report.recordings import find_recordings, read_recording
from paceline.report.steps import Step
from paceline.train.run_folder import CONFIG, EVENTS


def recorded_step(run: Path, number: int | None, problems: list[str]) -> Step:
    """A step of a run whose events were written down; of one that was done again, the last time.

    Args:
        run: The run's folder.
        number: Which step, as log lines count from 1; by default the last.
        problems: Sentences that say what is missing are added to them.

    Raises:
        UserError: There is no such step; says which there are.
    """
    damage = Damage()
    places = {place.step + 1: place for place in find_recordings(run / EVENTS, damage, sys.maxsize).places}
    problems += damage.describe(EVENTS)
    if not places:
        why = "; log.events-every says in which steps they are recorded"
        raise UserError(" ".join([f"{run / EVENTS} holds no events{why}.", *problems]))
    if number is None:
        number = max(places)
    if number not in places:
        raise UserError(
            f"step {number}: the run recorded events of steps {', '.join(map(str, places))}; choose one of these"
        )
    recording = read_recording(run / EVENTS, places[number], sys.maxsize)
    return Step(recording, groups_of(_strategy(run), recording.world_size))


def _strategy(run: Path) -> Strategy | None:
    """How the run's ranks shared the work; None if that cannot be read."""
    from paceline.train.command_line import parse_train_arguments

    try:
        return parse_train_arguments([str(run / CONFIG)]).strategy
    except (UserError, OSError):
        return None


def chrome_trace(events: Sequence[Event], groups: Groups) -> dict[str, Any]:
    """A Chrome trace: one process per rank, one thread per stream, arrows from an op to those that waited for it.

    They lead from the rank that came last at a collective to the others, and from a collective for which a rank stood
    still to what it computed then.

    Args:
        events: Of one step, any number of ranks, on one clock.
        groups: Who meets whom at a collective.

    Returns:
        JSON-ready; times in microseconds from the step's first event.
    """
    origin = min(event.start for event in events)
    out: list[dict[str, Any]] = []
    streams: list[str] = [stream for stream in STREAMS if any(event.stream == stream for event in events)]
    for rank in sorted({event.rank for event in events}):
        out.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for track, stream in enumerate(streams):
            out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": stream}})
            out.append(
                {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}
            )
    for event in events:
        entry = {
            "ph": "X",
            "name": f"{event.kind} {event.target}",
            "cat": event.kind,
            "pid": event.rank,
            "tid": streams.index(event.stream),
            "ts": (event.start - origin) * 1e6,
            "dur": event.seconds * 1e6,
            "args": {
                "step": event.step + 1,
                "micro-batch": event.micro_batch,
                "phase": event.phase,
                "buffer bytes": event.bytes,
                "sent bytes": event.sent,
                "received bytes": event.received,
                "exposed ms": event.exposed * 1e3,
            },
        }
        if event.exposed > 0:
            entry["cname"] = "terrible"
        out.append(entry)
    for number, flow in enumerate(flows(events, groups)):
        arrow = {"cat": "waiting", "name": flow.name, "id": number}
        for phase, event, at in (("s", flow.source, flow.left), ("f", flow.target, flow.arrived)):
            place = {"pid": event.rank, "tid": streams.index(event.stream), "ts": (at - origin) * 1e6}
            # Both ends belong to the op that they lie in, not to the next one on the track.
            out.append({**arrow, "ph": phase, **place, **({"bp": "e"} if phase == "f" else {})})
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def write_trace(step: Step, out: Path) -> None:
    """Writes the timeline of a step.

    Args:
        step: A recorded one.
        out: A .png or .svg is a picture, anything else a Chrome/Perfetto trace in JSON.

    Raises:
        UserError: The file cannot be written, or matplotlib is missing for a picture.
    """
    if out.suffix in (".png", ".svg"):
        from paceline.report.picture import draw

        draw(step.events, out)
        return
    try:
        out.write_text(json.dumps(chrome_trace(step.events, step.groups)) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; choose another file with --out") from None
