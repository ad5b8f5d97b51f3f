"""The page's section on gradient synchronisation: strategies side by side, and a step in numbers, moment by moment."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.command_line import quantities as said
from paceline.report.chunk_norms import ChunkNorms
from paceline.report.collective_numbers import EXAMPLES, collective_frames
from paceline.report.gradient_norms import norms_by_rank
from paceline.report.holdings import Holdings
from paceline.report.html import Html, Section, data, join, tag
from paceline.report.moments import MOST_RANKS, moments
from paceline.report.program import Program
from paceline.report.run import Run
from paceline.report.small_model import ITEMS, NAMES, RATE, START
from paceline.report.strategies import Compared, compared, strategies_table
from paceline.report.teaching import WAYS, frames

_KEYS_HELP = (
    "Keys: the arrows left and right go back and on, Home and End to the first and the last moment, and the space bar "
    "plays and pauses."
)


def synchronisation(run: Run) -> Section:
    """The section."""
    body: list[Html] = []
    sentence = "The schedule of this run is not known; below is a step of two ranks in numbers."
    if run.program is not None and run.program.schedule.world_size > 1:
        listed, refused = compared(run.program, run.what_if)
        sentence = _sentence(run, listed)
        body += [
            strategies_table(listed, refused),
            tag("p", _assumed(run), class_="note"),
            _of_the_run(run, run.program),
        ]
    elif run.program is not None:
        sentence = "One rank has nobody to synchronise gradients with; below is a step of two ranks in numbers."
    if run.world_size > 1:
        body.append(norms_by_rank(run.norms, run.program, run.is_own_loop))
    return Section("synchronisation", "Gradient synchronisation", sentence, join([*body, _in_numbers()]))


def _sentence(run: Run, listed: Sequence[Compared]) -> str:
    assert run.program is not None
    schedule = run.program.schedule
    buckets = schedule.reduced_buckets
    whole = sum(bucket.numel * bucket.gradient_itemsize for bucket in buckets)
    own = next(each for each in listed if each.is_own)
    filled = f", from {buckets[0].units[-1]} to {buckets[-1].units[0]}" if len(schedule.computed_units) > 1 else ""
    told = (
        f"Backward fills {said.count(len(buckets), 'bucket')} with {said.size(whole)} of gradients{filled}, and a rank "
        f"sends {said.size(own.sent)} in a step's {said.count(own.collectives, 'collective')}"
    )
    timed = sorted((each.step.seconds, each.name) for each in listed if each.step is not None)
    if not timed:
        return f"{told}."
    (first, fastest), (last, slowest) = timed[0], timed[-1]
    return (
        f"{told}; by simulation, of the strategies below “{fastest}” takes least time for this "
        f"model, {said.seconds(first)} a step, and “{slowest}” most, {said.seconds(last)}."
    )


def _assumed(run: Run) -> str:
    told = (
        "Bytes and buffers are those of each strategy's schedule for this model, on as many ranks, with the run's "
        "precision and bucket size; for Adam, without activations."
    )
    if run.what_if is None:
        return f"{told} Times are not known: the section What if says why."
    return (
        f"{told} Times are simulated as in the section What if, and under the same assumptions: of the run's slowest "
        "rank, from the end of the step before to its own."
    )


def _of_the_run(run: Run, program: Program) -> Html:
    """The run's own step, with what it needs to be stepped through."""
    times, world = None if run.what_if is None else run.what_if.times(), program.schedule.world_size
    ways = ["ring"] if program.schedule.holders < world else ["ring", "tree"]
    found = {way: moments(program, way, times, run.chunk_norms) for way in ways} if world <= MOST_RANKS else {}
    drawn = {way: each for way, each in found.items() if each is not None}
    if not drawn:
        why = "its ranks or its ops are too many to be drawn"
        return join([tag("h3", "This run's step"), tag("p", f"It is not shown moment by moment: {why}.")])
    holdings = Holdings(program.schedule, program.micro_batches)
    buckets = [
        [bucket.name, said.size(bucket.numel * bucket.gradient_itemsize), _named(bucket.units)]
        for bucket in holdings.buckets
    ]
    values = {
        "ranks": world,
        "chunks": holdings.chunks,
        "buckets": buckets,
        "ways": [[moment.to_list() for moment in each] for each in drawn.values()],
    }
    options = [tag("option", f"a {way}", value=index) for index, way in enumerate(drawn)]
    keys = [
        tag("li", words)
        for words in (
            "upper boxes: gradients, with the number of ranks whose are added up, Σ for all",
            "box at the side: sums that lie apart from the bucket",
            "lower boxes: parameters, ✓ after the update",
            "empty: not held",
            "framed: just changed",
        )
    ]
    order = "things happen in the order of the prediction" if times else "ops follow each other as in the schedule"
    return tag(
        "div",
        tag("h3", "This run's step"),
        tag(
            "p",
            f"Buckets, units, sizes and what each rank holds are those of the run's schedule; {order}. Collectives go "
            f"{'as chosen' if len(drawn) > 1 else 'around a ring'} here, which need not be what the run's transports "
            "chose.",
            class_="note",
        ),
        tag("div", tag("label", "Collectives as ", tag("select", *options, id="holdings-way")), class_="controls")
        if len(drawn) > 1
        else "",
        player("holdings", "This run's step"),
        tag("canvas", id="holdings-drawn", role="img", aria_label="What each rank holds of each bucket"),
        tag("ul", *keys, class_="keys"),
        _chunk_norms(run.chunk_norms, program.micro_batches),
        data("holdings-data", values),
    )


def _chunk_norms(norms: ChunkNorms | None, micro_batches: int) -> Html:
    """Where the page has what a bucket's chunks hold in numbers, and what these are."""
    if norms is None:
        told = (
            "What chunks hold in numbers, while it goes from rank to rank, is known where norms of gradients were "
            "asked for, of up to 16 ranks with 67 million gradients together."
        )
        return tag("p", told, class_="note")
    told = (
        f"In numbers: the norm of what is in each chunk, from the ranks' gradients in step {norms.step:,}. Every "
        "partial sum's follows from the products of each two ranks' gradients, taken before they were reduced. "
        f"A sum of all ranks is {'their mean' if norms.is_mean else 'not divided by their number'}."
    )
    if norms.parts > 1:
        told += f" Each of the {norms.parts} micro-batches is reduced: norms are of the last one's rounds."
    elif micro_batches > 1:
        told += f" A rank's {micro_batches} micro-batches are added up before."
    held = tag("div", id="holdings-norms", class_="wide", tabindex=0, role="region", aria_label="Norms of chunks")
    return join([held, tag("p", told, class_="note", id="holdings-norms-told")])


def _named(units: Sequence[str]) -> str:
    """Units of a bucket, the last of the forward pass first."""
    return ", ".join(reversed(units)) if len(units) < 4 else f"{units[-1]} … {units[0]}"


def _in_numbers() -> Html:
    """The step of two ranks in numbers, with what it needs to be stepped through."""
    ways = {name: [frame.to_dict() for frame in frames(*way)] for name, way in WAYS.items()}
    names = [list(NAMES)] * len(ways) + [list(example.names) for example in EXAMPLES.values()]
    alone = {name: [frame.to_dict() for frame in collective_frames(example)] for name, example in EXAMPLES.items()}
    final = next(iter(ways.values()))[-1]["held"]
    told = ", ".join(f"{name} = {value:.4f}" for name, value in zip(NAMES, final[0]["parameters"], strict=True))
    start = ", ".join(f"{name} = {value:g}" for name, value in zip(NAMES, START, strict=True))
    items = " and ".join(
        f"({x1:g}, {x2:g}), which should give {y:g}, on rank {i}" for i, ((x1, x2), y) in enumerate(ITEMS)
    )
    intro = (
        f"One step of gradient descent on two ranks, with y = w1 x1 + w2 x2 + b, the squared error, a rate of {RATE:g} "
        f"and {start}. The items are {items}; gradients are summed. Whichever way it is done, both ranks "
        f"end with {told}. The collectives alone are there, too, on more ranks: four whose numbers are 1, 10, 100 and "
        "1000, so that a sum's digits say whose are in it, and eight who add up to -0.1."
    )
    groups = (("The step of two ranks", tuple(ways), 0), ("A collective alone", tuple(alone), len(ways)))
    chosen = tag(
        "select",
        *(
            tag("optgroup", *(tag("option", each, value=first + i) for i, each in enumerate(listed)), label=label)
            for label, listed, first in groups
        ),
        id="numbers-way",
    )
    return tag(
        "div",
        tag("h3", "In numbers"),
        tag("p", intro, id="numbers-intro"),
        tag("div", tag("label", "What ", chosen), class_="controls"),
        player("numbers", "A step of two ranks in numbers"),
        tag("div", id="numbers-held", class_="wide", tabindex=0, role="region", aria_label="What each rank holds"),
        data("numbers-data", {"names": names, "ways": [*ways.values(), *alone.values()]}),
        class_="steps",
    )


def player(name: str, label: str) -> Html:
    """What steps through moments: buttons, a slider, and what has just happened in words."""
    buttons = [
        tag("button", words, type="button", data_act=act, **more)
        for act, words, more in (
            ("first", "First", {}),
            ("back", "Back", {}),
            ("play", "Play", {"aria_pressed": "false"}),
            ("next", "Next", {}),
            ("last", "Last", {}),
        )
    ]
    slider = tag("input", type="range", min=0, max=0, value=0, step=1, aria_label=f"{label}: moment")
    return tag(
        "div",
        tag("div", *buttons, slider, class_="controls"),
        tag("p", role="status", class_="told"),
        tag("p", _KEYS_HELP, class_="note help"),
        id=name,
        class_="player",
        role="group",
        aria_label=label,
    )
