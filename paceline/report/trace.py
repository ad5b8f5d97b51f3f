"""Events of one step as a timeline: a Chrome/Perfetto trace, or a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import UserError
from paceline.core.events import Event
from paceline.core.ops import STREAMS
from paceline.core.strategy import Strategy
from paceline.report.flows import flows
from paceline.report.meetings import Groups, groups_of


def read_events(path: Path) -> list[Event]:
    """Reads an events.jsonl.

    Raises:
        UserError: There is no such file, or a line is not an event.
    """
    if not path.is_file():
        raise UserError(f"{path}: no events there; expected the run folder of a training run with log.events-every > 0")
    events = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                event = msgspec.json.decode(line, type=Event)
                if event.stream not in STREAMS:
                    raise ValueError(f"expected a stream of {', '.join(STREAMS)}, got {event.stream[:40]!r}")
                if not all(map(math.isfinite, (event.start, event.end, event.exposed))):
                    raise ValueError("a time is not finite")
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not an event ({error})") from error
            events.append(event)
    return events


def events_of_step(events: Sequence[Event], step: int | None) -> list[Event]:
    """The events of one step, by default the last.

    Raises:
        UserError: There are none; says which steps there are.
    """
    steps = sorted({event.step for event in events})
    if not steps:
        raise UserError("the run recorded no events; set log.events-every above 0")
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise UserError(
            f"step {step}: the run recorded events of steps {', '.join(map(str, steps))}; choose one of these"
        )
    return [event for event in events if event.step == step]


def chrome_trace(events: Sequence[Event], groups: Groups | None = None) -> dict[str, Any]:
    """A Chrome trace: one process per rank, one thread per stream, arrows from an op to those that waited for it.

    They lead from the rank that came last at a collective to the others, and from a collective for which a rank stood
    still to what it computed then.

    Args:
        events: Of one step, any number of ranks of one host.
        groups: Who meets whom at a collective; all ranks by default.

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
                "step": event.step,
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
    for number, flow in enumerate(flows(events, groups or _groups(None, events))):
        arrow = {"cat": "waiting", "name": flow.name, "id": number}
        for phase, event, at in (("s", flow.source, flow.left), ("f", flow.target, flow.arrived)):
            place = {"pid": event.rank, "tid": streams.index(event.stream), "ts": (at - origin) * 1e6}
            # Both ends belong to the op that they lie in, not to the next one on the track.
            out.append({**arrow, "ph": phase, **place, **({"bp": "e"} if phase == "f" else {})})
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def write_trace(run: Path, step: int | None, out: Path) -> None:
    """Writes the timeline of one step of a run.

    Args:
        run: Run folder with an events.jsonl.
        step: Which step; by default the last recorded.
        out: A .png or .svg is a picture, anything else a Chrome/Perfetto trace in JSON.

    Raises:
        UserError: No such events, or matplotlib is missing for a picture.
    """
    events = events_of_step(read_events(run / "events.jsonl"), step)
    if out.suffix in (".png", ".svg"):
        from paceline.report.picture import draw

        draw(events, out)
    else:
        out.write_text(json.dumps(chrome_trace(events, groups_in(run, events))) + "\n", encoding="utf-8")


def groups_in(run: Path, events: Sequence[Event]) -> Groups | None:
    """Who meets whom in a run, by its strategy; None if that cannot be read."""
    from paceline.train.command_line import parse_train_arguments
    from paceline.train.run_folder import CONFIG

    try:
        strategy = parse_train_arguments([str(run / CONFIG)]).strategy
        return _groups(strategy, events)
    except (UserError, OSError):
        return None


def _groups(strategy: Strategy | None, events: Sequence[Event]) -> Groups:
    """Who meets whom; where numbers of ranks leave gaps, as in damaged files, all that are there."""
    ranks = sorted({event.rank for event in events})
    if strategy is not None and ranks == list(range(len(ranks))):
        return groups_of(strategy, len(ranks))
    everyone = tuple(ranks)
    return lambda event: everyone
