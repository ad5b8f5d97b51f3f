"""Strategies side by side for a run's model: what each would take, send and hold by its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.command_line import quantities as said
from paceline.core.errors import UserError
from paceline.core.memory import memory
from paceline.core.ops import COMPUTE
from paceline.core.strategy import SYSTEMS, Strategy
from paceline.report.html import Html, bar, join, table, tag
from paceline.report.program import Program
from paceline.report.variants import scheduled
from paceline.report.what_if import Predicted, WhatIf

_KEPT = ("precision", "reduce_in_float32", "recompute", "recompute_every", "gradients", "bucket_mb", "wire", "units")
"""Settings that are the run's with every strategy."""

_SAID = {"manual": "manual: per parameter, after backward"}
"""Systems whose names do not say what they do."""


@dataclass(frozen=True)
class Compared:
    """One strategy.

    Attributes:
        name: What it is called.
        is_own: Whether it is the run's.
        step: Its simulated step; None if costs are not known.
        collectives: How many a rank takes part in, in a step.
        sent: Bytes that a rank sends in a step, by the rank that sends most.
        received: Bytes that a rank receives, by the one that receives most.
        held: Bytes of the buffers of the rank that holds most, and of Adam's states.
    """

    name: str
    is_own: bool
    step: Predicted | None
    collectives: int
    sent: int
    received: int
    held: int


def compared(program: Program, costs: WhatIf | None) -> tuple[list[Compared], list[str]]:
    """Each strategy for the run's model on as many ranks; and why some are not for this run."""
    known, world = program.schedule.strategy, program.schedule.world_size
    kept = {name: getattr(known, name) for name in _KEPT}
    chosen = {_SAID.get(name, name): strategy for name, strategy in SYSTEMS.items()}
    chosen |= {f"zero {stage}": Strategy(zero=stage) for stage in (1, 2, 3)}
    if world >= 4 and world % 2 == 0:
        chosen[f"hybrid: zero 3 in groups of {world // 2}"] = Strategy(zero=3, shard=world // 2)
    found, refused = [], []
    if world < 4 or world % 2:
        refused.append(f"hybrid: needs two equal groups of at least two ranks, and there are {world} ranks")
    for name, strategy in chosen.items():
        try:
            found.append(_compare(program, replace(strategy, **kept), name, costs))
        except UserError as error:
            refused.append(f"{name}: {error}")
    if not any(each.is_own for each in found):
        found.insert(0, _compare(program, known, f"zero {known.stage} as this run has it", costs))
    return found, refused


def _compare(program: Program, strategy: Strategy, name: str, costs: WhatIf | None) -> Compared:
    world, count = program.schedule.world_size, program.micro_batches
    # With a parameter server, and nowhere else, ranks differ: the first from all others.
    schedules = [scheduled(program, strategy, world, rank) for rank in sorted({0, world - 1})]
    steps = [[op for op in schedule.step(count) if op.kind not in COMPUTE] for schedule in schedules]
    return Compared(
        name=name,
        is_own=strategy == program.schedule.strategy,
        step=None if costs is None else costs.simulated(schedules[0], costs.bandwidth),
        collectives=len(steps[0]),
        sent=max(sum(op.sent for op in step) for step in steps),
        received=max(sum(op.received for op in step) for step in steps),
        held=max(memory(schedule, count).total for schedule in schedules),
    )


def strategies_table(listed: Sequence[Compared], refused: Sequence[str]) -> Html:
    """The table, with a bar of each step."""
    longest = max((each.step.seconds for each in listed if each.step), default=0.0)
    heads = ("Strategy", "A step, by simulation", "Takes", "Nothing computes", "Collectives", "The busiest rank sends")
    rows = [
        (
            each.name + (" (this run)" if each.is_own and "this run" not in each.name else ""),
            _bar(each, longest),
            "–" if each.step is None else said.seconds(each.step.seconds),
            "–" if each.step is None else said.seconds(each.step.exposed),
            said.count(each.collectives),
            said.size(each.sent),
            said.size(each.received),
            said.size(each.held),
        )
        for each in listed
    ]
    keys = [
        tag("li", tag("span", class_=f"key time-{name}"), words)
        for name, words in (("computing", "computing"), ("exposed", "nothing computes"))
    ]
    notes = [tag("p", f"Not for this run: {'; '.join(refused)}", class_="note")] if refused else []
    caption = "Strategies for this run's model, on as many ranks"
    whole = table(caption, (*heads, "And receives", "And holds"), rows)
    return join([whole, tag("ul", *keys, class_="keys"), *notes])


def _bar(each: Compared, longest: float) -> Html:
    if each.step is None or longest <= 0:
        return Html("–")
    computing = each.step.seconds - each.step.exposed
    told = f"{each.name}: computing {said.seconds(computing)}, nothing computes {said.seconds(each.step.exposed)}"
    parts = [("time-computing", computing / longest), ("time-exposed", each.step.exposed / longest)]
    return bar(parts, told)
