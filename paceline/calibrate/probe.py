"""What an engine takes beside a model's operators: fitted to steps that it was seen to run. Pure but for the trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from paceline.calibrate.rank import PROBE
from paceline.core.build_layout import build_layout
from paceline.core.layout import ROOT
from paceline.core.schedule import Schedule
from paceline.core.simulate import timeline
from paceline.core.strategy import Stage, Strategy
from paceline.models.on_meta import on_meta
from paceline.models.transformer import Transformer
from paceline.plan.costs import step_costs
from paceline.plan.hardware import Hardware
from paceline.plan.stages import Shapes, shapes
from paceline.plan.trace import trace
from paceline.plan.work import Work

HOOKS = [0.0, *(5e-6 * 1.3**step for step in range(20))]
"""Seconds for each op of a schedule that are tried."""
CONTENTIONS = [0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.4, 2.0]
"""Shares by which computing is slower beside a collective that are tried: at 1 each has half of a core."""


def fitted(hardware: Hardware, steps: Mapping[Stage, float], ranks: int) -> Hardware:
    """The hardware with the host's time of an op, and the contention, by which the steps come out best.

    Args:
        hardware: What was measured of operators and collectives.
        steps: Seconds of the engine's steps on `PROBE`, by stage.
        ranks: How many ran them.
    """
    model = on_meta(lambda: Transformer(PROBE.model))
    work = trace(model, PROBE.batch, device="cpu")
    layout = shapes(model)

    ran = [(Strategy(zero=stage), seconds) for stage, seconds in steps.items()]

    def error(found: Hardware) -> float:
        return sum(
            math.log(step_seconds(layout, work, found, strategy, ranks) / seconds) ** 2 for strategy, seconds in ran
        )

    tried = [
        replace(hardware, hooks=hooks, kernels=replace(hardware.kernels, contention=contention))
        for hooks in HOOKS
        for contention in (CONTENTIONS if ranks > 1 else CONTENTIONS[:1])
    ]
    return min(tried, key=error)


def step_seconds(
    model: Shapes, work: Work, hardware: Hardware, strategy: Strategy, ranks: int, micro_batches: int = 1
) -> float:
    """Predicted seconds of a step among many."""
    layout = build_layout(model.parameters, (ROOT, *model.units), strategy, ranks)
    schedule = Schedule(layout, strategy, ranks, rank=0, order=model.units)
    costs = step_costs(work, hardware, schedule)
    line = timeline(schedule.step(micro_batches), costs, micro_batches, 3, hardware.kernels.contention)
    return line.last_step
