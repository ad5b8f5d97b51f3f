"""The page's section on memory: what ranks held over a step, what the schedule plans, and what each stage would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.command_line import quantities as said
from paceline.core.errors import UserError
from paceline.core.events import Event
from paceline.core.memory import Memory
from paceline.core.memory import memory as planned_memory
from paceline.report.curves import draw
from paceline.report.html import Html, Section, bar, join, table, tag
from paceline.report.program import Program
from paceline.report.run import Run
from paceline.report.variants import STAGES, own_setting, variant

_KINDS = {
    "parameters": ("computing", "parameters", "whole, or this rank's shards"),
    "gradients": ("forward", "gradients", "from backward to update"),
    "optimizer": ("validating", "optimizer", "its states, and masters in low precision"),
    "buckets": ("hidden", "buckets", "whole gradients on their way to be reduced"),
    "gathered": ("other", "gathered", "whole parameters while units compute with them"),
}
"""Of each kind: how it is coloured, what it is called, and what it is."""
_MOST_POINTS = 1000
_FLAT = 0.005
"""Of what is held: what changes by less does not change."""


def memory(run: Run) -> Section:
    """The section."""
    body: list[Html] = []
    if held := _held_most(run):
        body.append(draw(_chart(run, held), "memory-chart"))
    if run.program is not None:
        body += [_stages(run.program), _keys(), tag("p", _NOTE, class_="note")]
    return Section("memory", "Memory", _sentence(run, held), join(body))


def plan_of(run: Run) -> Memory | None:
    """What the schedule plans for a rank."""
    return None if run.program is None else planned_memory(run.program.schedule, run.program.micro_batches)


_NOTE = (
    "The plan adds up the buffers of the schedule, padding included, for Adam; they are there for as long as the model "
    "is trained. What comes and goes over a step is activations and what autograd and the optimizer need for a moment. "
    "Not in the plan, but in what is measured, are Python and PyTorch themselves (on a CPU all that the process holds) "
    "and what else the program keeps."
)


def _sentence(run: Run, held: Sequence[Event]) -> str:
    peak, plan = run.peak_bytes, plan_of(run)
    told = []
    if peak is not None:
        told.append(f"At most a rank held {said.size(peak)}")
    if held:
        least, most = (pick(held, key=lambda event: event.memory) for pick in (min, max))
        amount = (
            f"{said.size(most.memory)} from beginning to end"
            if most.memory - least.memory < _FLAT * most.memory
            else f"between {said.size(least.memory)}, at the start of {_op(least)}, and {said.size(most.memory)}, at "
            f"the start of {_op(most)}"
        )
        told.append(f"in step {held[0].step + 1:,} rank {most.rank} held {amount}")
    if plan is None:
        told.append("what was planned is not known, as the schedule is not")
    elif plan.total:
        largest = max(_KINDS, key=lambda name: getattr(plan, name))
        share = said.share(getattr(plan, largest) / plan.total)
        told.append(
            f"the schedule plans {said.size(plan.total)} of it, most for {_KINDS[largest][1]} ({share} of the plan)"
        )
    sentence = "; ".join(told) or "the schedule plans no memory"
    return f"{sentence[0].upper()}{sentence[1:]}."


def _op(event: Event) -> str:
    return f"{event.kind} of {event.target or 'the model'}"


# ---- over a step


def _held_most(run: Run) -> list[Event]:
    """The compute ops of the typical step on the rank that held most, if what was held is known."""
    known = [] if run.typical is None else [event for event in run.typical.events if event.memory > 0]
    if not known:
        return []
    fullest = max(known, key=lambda event: event.memory).rank
    return sorted((event for event in known if event.rank == fullest), key=lambda event: event.start)


def _chart(run: Run, held: Sequence[Event]) -> dict[str, Any]:
    """What that rank held when its ops began, over the step's milliseconds."""
    assert run.typical is not None
    every = -(-len(held) // _MOST_POINTS)
    shown = held[::every]
    return {
        "charts": [
            {
                "title": f"MiB that rank {held[0].rank} held, over the milliseconds of step {run.typical.number:,}",
                "x": "ms",
                "steps": [round(1e3 * (event.start - run.typical.origin), 3) for event in shown],
                "lines": [{"name": "held", "values": [round(event.memory / 2**20, 3) for event in shown]}],
                "notes": [_op(event) for event in shown],
            }
        ],
        "marks": {},
    }


# ---- by stage


def _stages(program: Program) -> Html:
    """What each stage of ZeRO would have a rank hold of the same model, by kind."""
    own, plans = own_setting(program), {}
    for stage in STAGES:
        try:
            schedule = variant(program, replace(own, stage=stage), 0)
        except UserError:
            # What else the run is set to does not go with it.
            continue
        name = f"zero {stage} (this run)" if stage == own.stage else f"zero {stage}"
        plans[name] = planned_memory(schedule, program.micro_batches)
    most = max(plan.total for plan in plans.values())
    rows = [
        (name, _bar(plan, most), *(said.size(getattr(plan, kind)) for kind in _KINDS), said.size(plan.total))
        for name, plan in plans.items()
    ]
    heads = ("Stage", "Planned", *(word.capitalize() for _, word, _ in _KINDS.values()), "All")
    return table("Planned for a rank, at each stage of ZeRO", heads, rows)


def _bar(plan: Memory, most: int) -> Html:
    told = ", ".join(f"{word} {said.size(getattr(plan, name))}" for name, (_, word, _) in _KINDS.items())
    parts = [(f"time-{colour}", getattr(plan, name) / max(1, most)) for name, (colour, _, _) in _KINDS.items()]
    return bar(parts, told)


def _keys() -> Html:
    items = [
        tag("li", tag("span", class_=f"key time-{colour}"), f"{word}: {what}") for colour, word, what in _KINDS.values()
    ]
    return tag("ul", *items, class_="keys")
