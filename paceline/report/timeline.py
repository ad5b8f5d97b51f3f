"""The page's timeline: what its script draws, as columns of numbers, one step after another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from paceline.command_line import quantities as said
from paceline.core.events import Event
from paceline.core.ops import COMPUTE, STREAMS
from paceline.report.critical_path import STOOD_STILL
from paceline.report.html import Html, Section, data, join, tag
from paceline.report.run import Run
from paceline.report.steps import Step, mean_times

MOST_RANKS = 32
"""More lanes than theirs do not fit on a screen."""
_MOST_PREDICTED = 8
"""Ranks beside whose lanes there is room for predicted ones."""
_MOST_NAMED = 6
_KEYS = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("update", "update"),
    ("other", "copying, adding up"),
    ("hidden", "communication, hidden"),
    ("exposed", "communication that a rank stands still for"),
)
_HELP = (
    "Drag to move, double-click or Ctrl + wheel to zoom. With the keyboard: + and − zoom, the arrow keys left and "
    "right move, up and down change the lane, N and P go to the next and the previous op, 0 shows the whole step, C "
    "marks the critical path."
)


def timeline(run: Run) -> Section:
    """The section."""
    if not run.steps:
        return Section(
            "timeline", "Timeline", "No events of steps were recorded, so there is nothing to draw.", Html("")
        )
    drawn = timeline_data(run)
    chosen = {id(step): name for name, step in (("slowest", run.slowest), ("typical", run.typical))}
    options = [
        tag("option", f"{chosen[id(step)]}: {_option(step)}", value=run.steps.index(step))
        for step in dict.fromkeys((run.typical, run.slowest))
        if step is not None
    ]
    options += [tag("option", _option(step), value=index) for index, step in enumerate(run.steps)]
    controls = tag(
        "div",
        tag("label", "Step ", tag("select", *options, id="step")),
        *(
            tag("button", words, type="button", id=name, **more)
            for name, words, more in (
                ("zoom-in", "Zoom in", {}),
                ("zoom-out", "Zoom out", {}),
                ("whole-step", "Whole step", {}),
                ("critical", "Critical path", {"aria_pressed": "false"}),
                ("predicted", "Predicted", {"aria_pressed": "true", "hidden": drawn["predicted"] is None}),
            )
        ),
        class_="controls",
    )
    body = [
        controls,
        tag(
            "canvas",
            id="lanes",
            tabindex=0,
            role="application",
            aria_label="Timeline of a step: one lane per rank and stream",
            aria_describedby="timeline-help details",
        ),
        tag("p", "Point at an op, or press N, to see what it is.", id="details", role="status"),
        legend(),
        tag("p", _HELP, id="timeline-help", class_="note"),
        data("timeline-data", drawn),
    ]
    return Section("timeline", "Timeline", _sentence(run), join(body))


def legend() -> Html:
    """What is drawn how."""
    return tag("ul", *(tag("li", tag("span", class_=f"key op-{name}"), words) for name, words in _KEYS), class_="keys")


def timeline_data(run: Run) -> dict[str, Any]:
    """The steps' lanes, events and critical paths; times are in microseconds from the step's first op."""
    kinds: dict[str, int] = {}
    names: dict[str, int] = {}
    steps = [_columns(step, ranks_shown(run), kinds, names) for step in run.steps]
    for step, columns in zip(run.steps, steps, strict=True):
        # One that another number of ranks ran is not the schedule's.
        known, recording = run.program, step.recording
        columns["isPredicted"] = (
            known is not None and recording.world_size == known.schedule.world_size and known.suits(recording)
        )
    typical = next((index for index, step in enumerate(run.steps) if step is run.typical), 0)
    return {
        "kinds": list(kinds),
        "names": list(names),
        "streams": list(STREAMS),
        "typical": typical,
        "steps": steps,
        "stoodStill": STOOD_STILL * 1e6,
        "predicted": _predicted(run, kinds, names),
        "parameters": {}
        if run.program is None
        else {name: _named(each) for name, each in run.program.parameters.items()},
    }


def _predicted(run: Run, kinds: dict[str, int], names: dict[str, int]) -> dict[str, Any] | None:
    """The simulated step of each rank that is drawn, unless these are many."""
    ranks = ranks_shown(run)
    if run.prediction is None or len(ranks) > _MOST_PREDICTED:
        return None
    events: list[Event] = []
    for rank in ranks:
        if rank in run.prediction.seconds:
            of_rank = run.prediction.events(rank)
            origin = min(event.start for event in of_rank)
            events += [replace(e, start=e.start - origin, end=e.end - origin) for e in of_rank]
    lanes, shown = _in_lanes(events, ranks)
    return _ops(shown, lanes, 0.0, kinds, names)


def _columns(step: Step, ranks: Sequence[int], kinds: dict[str, int], names: dict[str, int]) -> dict[str, Any]:
    lanes, shown = _in_lanes(step.events, ranks)
    lane_of = {lane: index for index, lane in enumerate(lanes)}
    index_of = {id(event): index for index, event in enumerate(shown)}
    met = [meeting for meeting in step.meetings if any(id(event) in index_of for event in meeting.events)]
    meeting_of = {id(event): number for number, meeting in enumerate(met) for event in meeting.events}

    def since(seconds: float) -> float:
        return round((seconds - step.origin) * 1e6, 1)

    return {
        "number": step.number,
        "seconds": step.seconds,
        **_ops(shown, lanes, step.origin, kinds, names),
        "unplanned": [index for index, event in enumerate(shown) if not event.planned],
        "meeting": [meeting_of.get(id(event), -1) for event in shown],
        "came": [since(meeting.came) for meeting in met],
        "last": [meeting.last.rank for meeting in met],
        "lastEvent": [index_of.get(id(meeting.last), -1) for meeting in met],
        "busBandwidth": [meeting.bus_bandwidth for meeting in met],
        "next": _what_waited(shown),
        "path": [
            [since(part.start), since(part.end), lane_of.get((part.rank, _stream(part.event)), -1)]
            for part in step.path
        ],
    }


def _in_lanes(events: Iterable[Event], ranks: Sequence[int]) -> tuple[list[tuple[int, str]], list[Event]]:
    """The lanes of some ranks that hold events, and these, lane by lane in the order of time."""
    listed = [event for event in events if event.rank in set(ranks)]
    present = {(event.rank, event.stream) for event in listed}
    lanes: list[tuple[int, str]] = [(rank, stream) for rank in ranks for stream in STREAMS if (rank, stream) in present]
    lane_of = {lane: index for index, lane in enumerate(lanes)}
    return lanes, sorted(listed, key=lambda event: (lane_of[event.rank, event.stream], event.start))


def _ops(
    events: Sequence[Event],
    lanes: Sequence[tuple[int, str]],
    origin: float,
    kinds: dict[str, int],
    names: dict[str, int],
) -> dict[str, Any]:
    """Columns of what measured and predicted events have in common."""
    lane_of = {lane: index for index, lane in enumerate(lanes)}
    return {
        "lanes": [[rank, STREAMS.index(stream)] for rank, stream in lanes],
        "kind": [kinds.setdefault(event.kind, len(kinds)) for event in events],
        "name": [names.setdefault(event.target, len(names)) for event in events],
        "lane": [lane_of[event.rank, event.stream] for event in events],
        "start": [round((event.start - origin) * 1e6, 1) for event in events],
        "took": [round(event.seconds * 1e6, 1) for event in events],
        "exposed": [round(event.exposed * 1e6, 1) for event in events],
        "bytes": [event.bytes for event in events],
        "sent": [event.sent for event in events],
        "microBatch": [event.micro_batch for event in events],
    }


def _named(parameters: Sequence[str]) -> str:
    more = len(parameters) - _MOST_NAMED
    return ", ".join(parameters[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _stream(event: Event | None) -> str:
    return "compute" if event is None else event.stream


def _what_waited(events: Sequence[Event]) -> list[list[int]]:
    """Pairs of a collective that a rank stood still for and the compute op that it then went on with."""
    computed: dict[int, tuple[list[float], list[int]]] = {}
    for index, event in sorted(enumerate(events), key=lambda item: item[1].end):
        if event.kind in COMPUTE:
            ends, indices = computed.setdefault(event.rank, ([], []))
            ends.append(event.end)
            indices.append(index)
    pairs = []
    for index, event in enumerate(events):
        if event.kind not in COMPUTE and event.exposed > STOOD_STILL and event.rank in computed:
            ends, indices = computed[event.rank]
            if (place := bisect_right(ends, event.end)) < len(ends):
                pairs.append([index, indices[place]])
    return pairs


def ranks_shown(run: Run) -> list[int]:
    """All ranks, or of many those that the others stand still for longest."""
    times = mean_times(run.steps)
    costly = sorted(times, key=lambda each: (-each.cost, each.rank))[:MOST_RANKS]
    return sorted(each.rank for each in costly)


def _option(step: Step) -> str:
    return f"step {step.number:,}, {said.seconds(step.seconds)}"


def _sentence(run: Run) -> str:
    step = run.typical
    assert step is not None
    times = step.ranks
    exposed, seconds = sum(each.exposed for each in times), sum(each.seconds for each in times)
    talked = sum(event.seconds for event in step.events if event.kind not in COMPUTE)
    sentence = f"Step {step.number:,}, the typical one of {len(run.steps):,}, takes {said.seconds(step.seconds)}"
    if talked > 0 and seconds > 0:
        hidden = max(0.0, 1 - exposed / talked)
        sentence += (
            f": ranks compute nothing for {said.share(exposed / seconds)} of it as they wait for collectives, and "
            f"{said.share(hidden)} of the time that collectives take is hidden behind computing"
        )
    longest = 0.0 if run.prediction is None else max(run.prediction.seconds.values(), default=0.0)
    if 0 < longest < step.seconds:
        sentence += (
            ". By its schedule, with each op as it mostly is, nobody to wait for and no pause, the slowest rank would "
            f"need {said.seconds(longest)}"
        )
    if len(times) > MOST_RANKS:
        sentence += f". Of {len(times):,} ranks those {MOST_RANKS} are drawn that the others stand still for longest"
    return sentence + "."
