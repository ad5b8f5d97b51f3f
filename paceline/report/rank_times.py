"""The page's section on ranks: where each one's time goes, and whom the others stand still for."""

from __future__ import annotations

import statistics

from paceline.command_line import quantities as said
from paceline.report.html import Html, Section, bar, join, table, tag
from paceline.report.run import Run
from paceline.report.steps import RankTimes, mean_times, straggler

_MOST_RANKS = 64
PARTS = (
    ("computing", "computing"),
    ("between", "between ops"),
    ("transfer", "standing still while data moves"),
    ("waiting", "standing still for another rank"),
)


def ranks(run: Run) -> Section:
    """The section."""
    times = mean_times(run.steps)
    if not times:
        return Section("ranks", "Ranks", "No events of ranks were recorded.", Html(""))
    shown = times if len(times) <= _MOST_RANKS else sorted(times, key=lambda each: -each.cost)[:_MOST_RANKS]
    longest = max(each.seconds + each.before for each in shown)
    heads: tuple[str, ...] = (
        "Rank",
        "Where its time goes",
        "Computing",
        "Between ops",
        "Exposed",
        "Waiting for others",
    )
    heads = (*heads, "Begins late by", "Comes last", "Costs the others")
    caption = "A step of each rank, on average" + (
        f", of the {_MOST_RANKS} of {len(times):,} ranks that cost the others most" if len(shown) < len(times) else ""
    )
    rows = [(f"rank {each.rank}", _bar(each, longest), *_cells(each)) for each in shown]
    keys = [tag("li", tag("span", class_=f"key time-{name}"), words) for name, words in PARTS]
    note = (
        "A rank comes last at a collective if it begins it after all others; what that costs is the time in which "
        "another rank computes nothing until it has come, on average over the others. How long the collective's own op "
        "takes says nothing of that: it makes all ranks look equal."
    )
    clocks = "".join(f" {told}" for told in _clocks(run))
    body = [table(caption, heads, rows), tag("ul", *keys, class_="keys"), tag("p", note + clocks, class_="note")]
    return Section("ranks", "Ranks", _sentence(run, times), join(body))


def _sentence(run: Run, times: list[RankTimes]) -> str:
    if len(times) == 1:
        return "There is one rank, which waits for no other."
    slow = straggler(run.steps)
    if slow is not None:
        return (
            f"In {slow.steps:,} of {len(run.steps):,} recorded steps the others stand still longest for rank "
            f"{slow.rank}, {said.seconds(slow.cost)} a step ({said.share(slow.of_step)}); it comes last at "
            f"{said.share(slow.last)} of the collectives and takes longer "
            f"{'computing' if slow.cause == 'computing' else f'with {slow.cause}'}."
        )
    most = max(times, key=lambda each: each.cost)
    if not most.meetings:
        return "Who came last cannot be said: of no collective all ranks' events are there."
    length = statistics.fmean(step.seconds for step in run.steps)
    return (
        f"No rank stands out. The others stand still longest for rank {most.rank}, {said.seconds(most.cost)} a step "
        f"({said.share(most.cost / length)} on average), but not so often that it could be no chance, or not for long."
    )


def parts_of(each: RankTimes) -> dict[str, float]:
    """Seconds of each of `PARTS`."""
    return {
        "computing": each.computing,
        "between": each.between,
        "transfer": max(0.0, each.exposed - each.waiting),
        "waiting": each.waiting,
    }


def _bar(each: RankTimes, longest: float) -> Html:
    parts = parts_of(each)
    told = ", ".join(f"{words} {said.seconds(parts[name])}" for name, words in PARTS)
    drawn = [("nothing", each.before / longest), *((f"time-{name}", parts[name] / longest) for name, _ in PARTS)]
    return bar(drawn, f"rank {each.rank}: {told}")


def _cells(each: RankTimes) -> tuple[str, ...]:
    last = f"{said.share(each.last / each.meetings)} of {each.meetings:,}" if each.meetings else "–"
    times = (each.computing, each.between, each.exposed, each.waiting, each.before)
    return (*map(said.seconds, times), last, said.seconds(each.cost))


def _clocks(run: Run) -> list[str]:
    """How far apart hosts' clocks are, of the typical step."""
    clocks = run.typical.clocks if run.typical is not None else {}
    return [
        f"The clock of rank {rank} is {said.seconds(abs(offset.seconds))} "
        f"{'ahead of' if offset.seconds > 0 else 'behind'} rank 0's, give or take {said.seconds(offset.spread)}; times "
        "here are set right by that."
        for rank, offset in list(clocks.items())[:8]
    ]
