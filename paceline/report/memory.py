"""The page's section on memory: what the schedule's buffers take of a rank, by kind, and the peak that was measured."""

from __future__ import annotations

from dataclasses import fields

from paceline.core.memory import Memory
from paceline.core.memory import memory as planned_memory
from paceline.report import quantities as said
from paceline.report.html import Html, Section, bar, join, table, tag
from paceline.report.run import Run

_KINDS = {
    "parameters": ("computing", "parameters: whole, or this rank's shards"),
    "gradients": ("forward", "gradients, from backward to update"),
    "optimizer": ("validating", "the optimizer's states, and masters in low precision"),
    "buckets": ("hidden", "whole gradients on their way to be reduced"),
    "gathered": ("other", "whole parameters while units compute with them"),
}
"""Of each kind: how it is coloured, and what it is."""


def memory(run: Run) -> Section:
    """The section."""
    peak = run.history.last_figure("memory/peak_bytes")
    measured = "" if peak is None else f"At most a rank held {said.size(peak)}"
    if run.program is None:
        sentence = f"{measured}. " if measured else ""
        return Section(
            "memory", "Memory", sentence + "What was planned is not known, as the schedule is not.", Html("")
        )
    plan = planned_memory(run.program.schedule, run.program.micro_batches)
    rows = [(words, said.size(getattr(plan, name)), _share(plan, name)) for name, (_, words) in _KINDS.items()]
    body = [
        _bar(plan),
        table("Planned for a rank", ("", "Bytes", "Of the plan"), [*rows, ("all", said.size(plan.total), "100 %")]),
        tag(
            "p",
            "The plan adds up the buffers of the schedule, padding included, for Adam. Not in it, but in what is "
            "measured, are activations, Python and PyTorch themselves (on a CPU all that the process holds), and what "
            "else the program keeps.",
            class_="note",
        ),
    ]
    return Section("memory", "Memory", _sentence(plan, peak, measured), join(body))


def _sentence(plan: Memory, peak: float | None, measured: str) -> str:
    most = max(fields(plan), key=lambda field: getattr(plan, field.name)).name
    told = (
        f"the schedule plans {said.size(plan.total)} of a rank's memory, most of it for {_KINDS[most][1]} "
        f"({_share(plan, most)})"
    )
    if peak is None or not plan.total:
        return told[0].upper() + told[1:] + "."
    return f"{measured}; {told}. The plan is {said.share(plan.total / peak)} of what was measured."


def _bar(plan: Memory) -> Html:
    if not plan.total:
        return Html("")
    parts = [(f"time-{colour}", getattr(plan, name) / plan.total) for name, (colour, _) in _KINDS.items()]
    told = ", ".join(f"{words} {said.size(getattr(plan, name))}" for name, (_, words) in _KINDS.items())
    keys = [
        tag("li", tag("span", class_=f"key time-{colour}"), words)
        for name, (colour, words) in _KINDS.items()
        if getattr(plan, name)
    ]
    return tag("figure", bar(parts, told), tag("ul", *keys, class_="keys"))


def _share(plan: Memory, name: str) -> str:
    return said.share(getattr(plan, name) / plan.total) if plan.total else "–"
