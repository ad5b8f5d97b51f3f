"""The page's section on collectives: bytes against formula, time, bandwidth, and what of it was exposed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.command_line import quantities as said
from paceline.core.ops import COMPUTE
from paceline.report.html import Html, Section, bar, join, table, tag
from paceline.report.link_limit import link_limit
from paceline.report.meetings import JOINT, Meeting
from paceline.report.run import Run
from paceline.report.steps import Step, met

_MOST_BARS = 40


@dataclass(frozen=True)
class Collective:
    """What collectives of one kind, or one collective, did: in a step, on average over ranks and steps.

    Attributes:
        name: Kind, and target where it is one.
        count: How many there were in a step.
        bytes: Of their buffers.
        sent: Bytes that a rank sent.
        formula: Bytes that it has to send at least; None where ranks do not send alike.
        seconds: From when all had come until all had done.
        waiting: Seconds in which a rank stood still as another had not come.
        exposed: Seconds in which a rank stood still, waiting included.
        algorithm_bandwidth: Bytes of the buffer per second, in the middle; None where that is not known.
        bus_bandwidth: The same of the bytes of the formula.
    """

    name: str
    count: float
    bytes: float
    sent: float
    formula: float | None
    seconds: float
    waiting: float
    exposed: float
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None


def collectives(steps: Sequence[Step], by_target: bool = False) -> list[Collective]:
    """The collectives of steps, by kind and phase or each by itself, in the order in which they begin."""

    def name(meeting: Meeting) -> str:
        event = meeting.events[0]
        return f"{event.kind} of {event.target}, {event.phase}" if by_target else f"{event.kind}, {event.phase}"

    return [_sum_up(called, each) for called, each in met(steps, name).items()]


def _sum_up(name: str, parts: Sequence[tuple[float, Meeting]]) -> Collective:
    listed = [meeting for _, meeting in parts]
    bandwidths = [each.algorithm_bandwidth for each in listed if each.algorithm_bandwidth is not None]
    on_the_bus = [each.bus_bandwidth for each in listed if each.bus_bandwidth is not None]
    has_formula = listed[0].events[0].kind in JOINT - {"barrier"} and any(len(each.ranks) > 1 for each in listed)

    def per_rank(value: Callable[[Meeting], float]) -> float:
        return sum(part * value(meeting) for part, meeting in parts)

    return Collective(
        name=name,
        count=per_rank(lambda meeting: 1),
        bytes=per_rank(lambda meeting: meeting.events[0].bytes),
        sent=per_rank(lambda meeting: statistics.fmean(event.sent for event in meeting.events)),
        formula=per_rank(lambda meeting: meeting.events[0].bytes * meeting.share) if has_formula else None,
        seconds=per_rank(lambda meeting: meeting.seconds),
        waiting=per_rank(lambda meeting: statistics.fmean(map(meeting.waited, meeting.events))),
        exposed=per_rank(lambda meeting: statistics.fmean(event.exposed for event in meeting.events)),
        algorithm_bandwidth=statistics.median(bandwidths) if bandwidths else None,
        bus_bandwidth=statistics.median(on_the_bus) if on_the_bus else None,
    )


def communication(run: Run) -> Section:
    """The section."""
    kinds, each = collectives(run.steps), collectives(run.steps, by_target=True)
    if not kinds:
        reason = "one rank alone sends nothing" if run.world_size == 1 else "no events of collectives were recorded"
        return Section("communication", "Communication", f"There is nothing to show: {reason}.", Html(""))
    heads: tuple[str, ...] = (
        "Collective",
        "In a step",
        "Buffers",
        "A rank sends",
        "Of the formula",
        "Takes",
        "Exposed",
    )
    heads = (*heads, "Waiting for others", "algbw", "busbw")
    rows = [
        (
            one.name,
            said.digits(one.count) if one.count % 1 else said.count(one.count),
            said.size(one.bytes),
            said.size(one.sent),
            "–" if not one.formula else said.share(one.sent / one.formula),
            said.seconds(one.seconds),
            said.seconds(one.exposed),
            said.seconds(one.waiting),
            said.rate(one.algorithm_bandwidth),
            said.rate(one.bus_bandwidth),
        )
        for one in kinds
    ]
    body = [
        table("Collectives of a step, on average", heads, rows),
        tag("p", _left_out(run), class_="note") if _left_out(run) else "",
        tag(
            "p",
            "The formula counts what a rank has to send at least: 2 (N − 1) / N of the buffer for an all-reduce, "
            "(N − 1) / N for an all-gather or a reduce-scatter. A collective takes the time from when its last rank "
            "has come until all have done; algbw is buffer bytes in that time, busbw the formula's bytes. Exposed is "
            "how long a rank computed nothing because of it.",
            class_="note",
        ),
        _bars(each),
        link_limit(run),
    ]
    return Section("communication", "Communication", _sentence(kinds, each) + _by_link(run), join(body))


def _sentence(kinds: Sequence[Collective], each: Sequence[Collective]) -> str:
    sent, seconds, exposed = (sum(getattr(one, name) for one in kinds) for name in ("sent", "seconds", "exposed"))
    most = max(each, key=lambda one: one.exposed)
    worst = (
        f"; {most.name} is exposed most, {said.seconds(most.exposed)}, of which a rank waits "
        f"{said.seconds(most.waiting)} for others to come"
        if most.exposed > 0
        else ""
    )
    return (
        f"In a step a rank sends {said.size(sent)} in collectives that take {said.seconds(seconds)}, and stands still "
        f"for {said.seconds(exposed)}{worst}."
    )


def _left_out(run: Run) -> str:
    """What a step's events do not have, as it is still under way when they are written down."""
    if run.program is None:
        return ""
    known = {event.kind for step in run.steps for event in step.events if event.phase == "update"}
    sent = sum(op.sent for op in run.program.ops if op.phase == "update" and op.kind not in COMPUTE | known)
    told = "What a rank sends behind its update, {}, is not among them: it goes on while the next step begins."
    return told.format(said.size(sent)) if sent else ""


def _by_link(run: Run) -> str:
    """What the fitted link is, as one more sentence."""
    if run.link is None:
        return ""
    return (
        f" Fitted to what they take, a rank's link carries {run.link.in_words} and costs "
        f"{said.seconds(run.link.latency)} a round; "
        + (
            "how well cannot be said, as a line goes through any two kinds or sizes of collective."
            if run.link.is_exact
            else f"the middle collective took {said.share(run.link.typical_miss)} more or less than that."
        )
    )


def _bars(each: Sequence[Collective]) -> Html:
    """The collectives that take longest, each as a bar of its time, in the order in which they begin."""
    chosen = sorted(each, key=lambda one: -max(one.seconds, one.exposed))[:_MOST_BARS]
    longest = max((sum(seconds for _, seconds in _parts(one)) for one in chosen), default=0.0)
    if longest <= 0:
        return Html("")
    rows = []
    for one in (one for one in each if one in chosen):
        parts = _parts(one)
        told = ", ".join(f"{name} {said.seconds(seconds)}" for name, seconds in parts)
        drawn = bar([(f"time-{name}", seconds / longest) for name, seconds in parts], f"{one.name}: {told}")
        rows.append((one.name, said.size(one.bytes), drawn, told))
    left = f", the {_MOST_BARS} of {len(each):,} that take longest" if len(each) > _MOST_BARS else ""
    keys = [
        tag("li", tag("span", class_=f"key time-{name}"), words)
        for name, words in (
            ("hidden", "hidden behind computing"),
            ("exposed", "exposed"),
            ("waiting", "exposed, waiting for another rank"),
        )
    ]
    return join(
        [
            table(f"Each collective of a step, on average{left}", ("Collective", "Buffer", "Time", "In words"), rows),
            tag("ul", *keys, class_="keys"),
        ]
    )


def _parts(one: Collective) -> list[tuple[str, float]]:
    transfer = max(0.0, one.exposed - one.waiting)
    return [("hidden", max(0.0, one.seconds - transfer)), ("exposed", transfer), ("waiting", one.waiting)]
