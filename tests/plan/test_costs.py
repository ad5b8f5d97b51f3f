from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from torch import nn

from paceline.core.build_layout import build_layout
from paceline.core.layout import ROOT
from paceline.core.schedule import Schedule
from paceline.core.simulate import simulate
from paceline.core.strategy import Strategy
from paceline.models.presets import PRESETS
from paceline.plan.costs import step_costs, unit_seconds
from paceline.plan.hardware import Device, Hardware, Kernels, Link
from paceline.plan.models import meta_model
from paceline.plan.stages import shapes
from paceline.plan.transformer_work import transformer_work

DEVICE = Device("made up", 80 << 30, 2e12, {"bfloat16": 3e14}, {"bfloat16": 2e14})
HARDWARE = Hardware(DEVICE, Kernels(5e-6, 0.8, 0.9, 1e9, 0.5), 8, Link(2e-6, 2e11), Link(6e-6, 2e10))


def schedule_of(strategy: Strategy, devices: int) -> Schedule:
    model: nn.Module = meta_model("llama-1b")
    found = shapes(model)
    layout = build_layout(found.parameters, (ROOT, *found.units), strategy, devices)
    return Schedule(layout, strategy, devices, rank=0, order=found.units)


def seconds(strategy: Strategy, devices: int, hardware: Hardware = HARDWARE) -> float:
    schedule = schedule_of(strategy, devices)
    costs = step_costs(transformer_work(PRESETS["llama-1b"], 1, 2048), hardware, schedule)
    return max(event.end for event in simulate(schedule, costs))


def test_every_unit_of_the_reference_transformer_has_its_work() -> None:
    names = {unit.unit for unit in transformer_work(PRESETS["llama-1b"], 1).units}
    # The embedding is tied to the head, whose weight it is.
    assert set(shapes(meta_model("llama-1b")).units) - names <= {"positions"}


def test_a_step_takes_its_computing_and_more_where_it_communicates() -> None:
    work = transformer_work(PRESETS["llama-1b"], 1, 2048)
    alone = seconds(Strategy(precision="bfloat16"), 1)
    computing = sum(unit.forward + unit.backward for unit in unit_seconds(work, HARDWARE, Strategy()).values())
    assert computing < alone < 1.5 * computing
    links = [replace(HARDWARE, between=Link(6e-6, bandwidth)) for bandwidth in (2e10, 2e9, 2e8)]
    times = [seconds(Strategy(zero=3, precision="bfloat16"), 16, each) for each in links]
    assert all(quick < slow for quick, slow in pairwise(times))


def test_recomputing_adds_the_blocks_forward() -> None:
    work = transformer_work(PRESETS["llama-1b"], 1, 2048)
    units = unit_seconds(work, HARDWARE, Strategy(recompute="unit", recompute_every=2))
    assert units["blocks.1"].recompute == pytest.approx(units["blocks.1"].forward)
    assert units["blocks.0"].recompute == units["head"].recompute == 0
    kept = unit_seconds(work, HARDWARE, Strategy(recompute="keep_attention"))
    assert 0 < kept["blocks.0"].recompute < units["blocks.1"].recompute


def test_from_stage_1_on_a_rank_reads_its_own_gradients_for_their_squares() -> None:
    took = {}
    for stage in (0, 1, 2):
        strategy = Strategy(zero=stage, precision="bfloat16")  # type: ignore[arg-type]
        schedule = schedule_of(strategy, 8)
        costs = step_costs(transformer_work(PRESETS["llama-1b"], 1, 2048), HARDWARE, schedule)
        took[stage] = next(costs(op) for op in schedule.step(1) if op.kind == "statistics")
    gradients = sum(flat.numel * flat.gradient_itemsize for flat in schedule.layout.flats)
    assert took[0] == 0.0
    assert took[1] == took[2] == pytest.approx(gradients / 8 / (2e12 * 0.8))
