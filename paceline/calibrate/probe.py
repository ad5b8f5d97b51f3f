"""What an engine takes beside a model's operators: fitted to steps that it was seen to run. Pure but for the trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace

from paceline.calibrate.rank import EMPTY, PROBE
from paceline.core.build_layout import build_layout
from paceline.core.build_schedule import build_schedule
from paceline.core.layout import ROOT
from paceline.core.ops import COMPUTE, Key, Op
from paceline.core.schedule import Schedule
from paceline.core.simulate import timeline
from paceline.core.strategy import Stage, Strategy
from paceline.measuring.cases import Case
from paceline.models.on_meta import on_meta
from paceline.models.transformer import Transformer
from paceline.plan.costs import step_costs
from paceline.plan.hardware import Hardware, Rates
from paceline.plan.stages import Shapes, shapes
from paceline.plan.trace import trace
from paceline.plan.work import Work

CONTENTIONS = [
    0.0,
    0.05,
    0.1,
    0.15,
    0.2,
    0.275,
    0.35,
    0.42,
    0.5,
    0.6,
    0.75,
    0.9,
    1.0,
    1.2,
    1.4,
    1.7,
    2.0,
    3.0,
    5.0,
    10.0,
]
"""Shares by which computing is slower beside a collective that are tried: at 1 each has half of a core, at 10 computing
all but stands still, as it does where ranks leave no core idle."""

IN_STEPS = [0.9 * 1.02**step for step in range(65)]
"""How many times as long computing takes in a step as by itself: from 0.9 to 3.2."""

STEPS = 3
"""Simulated in a row, the last of which counts."""

_ENGINES = ("update", "copy_in", "cast", "squares")


def fitted(hardware: Hardware, smallest: float, steps: Mapping[str, Mapping[Stage, float]], ranks: int) -> Hardware:
    """The hardware with what a step adds to operators: the host's time of an op, other work between, and contention.

    By itself an operator finds its memory in caches, has all of them, and a clock that stops at each one sees those
    that nothing disturbed. In a step it follows others, and where ranks are more than cores it waits for one. How many
    times as long it then takes is one number for each precision.

    Args:
        hardware: What was measured of operators and collectives.
        smallest: Seconds of the engine's step on `EMPTY`, in which the host's own time is most of it.
        steps: Seconds of its steps on `PROBE`, by precision and stage.
        ranks: How many ran them.
    """
    hardware = replace(hardware, hooks=0.0)
    model, work = _traced(EMPTY, "float32")
    rest = smallest - step_seconds(model, work, hardware, Strategy(), ranks)
    computing = sum(op.kind in COMPUTE for op in _schedule(model, Strategy(), ranks).step(1))
    hardware = replace(hardware, hooks=max(0.0, rest / computing))
    contentions = CONTENTIONS if ranks > 1 else CONTENTIONS[:1]
    for precision, took in steps.items():
        model, work = _traced(PROBE, precision)
        ran = [
            (_schedule(model, Strategy(zero=stage, precision=precision), ranks), seconds)  # type: ignore[arg-type]
            for stage, seconds in took.items()
        ]
        found = []
        for share in IN_STEPS:
            slower = in_steps(hardware, precision, share)
            costs = [(schedule.step(1), step_costs(work, slower, schedule), seconds) for schedule, seconds in ran]
            known = [(ops, {op.key: cost(op) for op in ops}, seconds) for ops, cost, seconds in costs]
            found += [(_error(known, contention), share, contention) for contention in contentions]
        _, share, contention = min(found)
        hardware = replace(
            in_steps(hardware, precision, share), kernels=replace(hardware.kernels, contention=contention)
        )
        # The first precision's, of which every stage ran, holds for all.
        contentions = [contention]
    return hardware


def _error(ran: Sequence[tuple[Sequence[Op], Mapping[Key, float], float]], contention: float) -> float:
    total = 0.0
    for ops, alone, seconds in ran:
        line = timeline(ops, lambda op, alone=alone: alone[op.key], 1, STEPS, contention)  # type: ignore[misc]
        total += math.log(line.last_step / seconds) ** 2
    return total


def in_steps(hardware: Hardware, precision: str, share: float) -> Hardware:
    """The hardware with all that computes in a precision, and with float32 the engine's copies, so much slower."""

    def slower(name: str, rates: Rates) -> Rates:
        if name.endswith(f" {precision}") or (precision == "float32" and name in _ENGINES):
            return Rates(*(share * part for part in astuple(rates)))
        return rates

    return replace(hardware, measured={name: slower(name, rates) for name, rates in hardware.measured.items()})


def _traced(case: Case, precision: str) -> tuple[Shapes, Work]:
    model = on_meta(lambda: Transformer(case.model))
    return shapes(model), trace(model, case.batch, precision=precision, device="cpu")


def step_seconds(
    model: Shapes, work: Work, hardware: Hardware, strategy: Strategy, ranks: int, micro_batches: int = 1
) -> float:
    """Predicted seconds of a step among many."""
    schedule = _schedule(model, strategy, ranks)
    costs = step_costs(work, hardware, schedule)
    line = timeline(schedule.step(micro_batches), costs, micro_batches, STEPS, hardware.kernels.contention)
    return line.last_step


def _schedule(model: Shapes, strategy: Strategy, ranks: int) -> Schedule:
    layout = build_layout(model.parameters, (ROOT, *model.units), strategy, ranks)
    return build_schedule(layout, strategy, ranks, rank=0, order=model.units)
