"""What collectives took against what the fitted link says: rounds, bytes, and what is neither."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.command_line import quantities as said
from paceline.report.html import Html, figures, join, table, tag
from paceline.report.link import COUNTED, Link, rounds_and_share
from paceline.report.meetings import Meeting
from paceline.report.run import Run
from paceline.report.steps import met


def link_limit(run: Run) -> Html:
    """The link's figures, and a table of each kind of collective against it."""
    if run.link is None:
        return tag(
            "p",
            "What a round and what a byte cost cannot be told from these collectives, which are all of one size.",
            class_="note",
        )
    link = run.link
    heads = (
        "Collective",
        "A link carries",
        "At its bandwidth",
        "Rounds",
        "Their latency",
        "The limit",
        "Took",
        "Of it",
    )
    body = [
        figures(
            [
                (
                    "link_bandwidth",
                    "Bandwidth of a rank's link, fitted",
                    link.in_words,
                    link.bandwidth if link.has_limit else None,
                ),
                ("link_latency", "Latency of a round, fitted", said.seconds(link.latency), link.latency),
                ("link_miss", "The middle collective misses that by", said.share(link.typical_miss), link.typical_miss),
            ][: 2 if link.is_exact else None]
        ),
        table("A step's collectives against the fitted link, on average", heads, _rows(run, link)),
        tag(
            "p",
            f"The link is fitted to the time in the middle of each of {link.samples} kinds and sizes of collective, "
            "with the least relative error; "
            + (
                "a line goes through any two"
                if link.is_exact
                else f"the one that it says worst it misses by {said.share(link.worst_miss)}"
            )
            + ". A "
            "collective is counted as a ring: 2 (N − 1) rounds for an all-reduce, N − 1 for an all-gather or a "
            "reduce-scatter, each with the latency and a part of the buffer. The limit is the two times together; what "
            "is taken beyond it went elsewhere, such as into ranks that were not given a processor.",
            class_="note",
        ),
    ]
    return join(body)


def _rows(run: Run, link: Link) -> list[tuple[str, ...]]:
    def name(meeting: Meeting) -> str:
        event = meeting.events[0]
        return f"{event.kind}, {event.phase}" if meeting.is_whole and event.kind in COUNTED else ""

    return [(called, *_cells(each, link)) for called, each in met(run.steps, name).items()]


def _cells(parts: Sequence[tuple[float, Meeting]], link: Link) -> tuple[str, ...]:
    rounds = carried = took = 0.0
    for part, meeting in parts:
        event = meeting.events[0]
        often, share = rounds_and_share(event.kind, len(meeting.ranks))
        rounds += part * often
        carried += part * event.bytes * share
        took += part * meeting.seconds
    transfer, latency = carried / link.bandwidth, rounds * link.latency
    times = map(said.seconds, (latency, transfer + latency, took))
    of_it = said.share((transfer + latency) / took) if took > 0 else "–"
    return said.size(carried), said.seconds(transfer), said.digits(rounds), *times, of_it
