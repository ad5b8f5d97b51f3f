from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.strategy import Strategy
from paceline.models.presets import PRESETS
from paceline.plan import profiles
from paceline.plan.case import Case, split
from paceline.plan.estimate import Setting
from paceline.plan.least import Least
from paceline.plan.subject import of_module, transformer
from tests.quick import examples

SMALL = transformer("small", PRESETS["small"])
LLAMA = transformer("llama-8b", PRESETS["llama-8b"])


@st.composite
def chosen(draw: st.DrawFn) -> tuple[Case, Setting]:
    devices = draw(st.sampled_from([1, 2, 8, 16, 64]))
    stage = draw(st.integers(0, 3)) if devices > 1 else 0
    groups = [0, *(size for size in (2, 8) if stage and size < devices)]
    count = draw(st.integers(1, 6))
    ways = ["auto", *(["defer"] if stage >= 2 else []), *(["hold"] if stage == 3 else [])]
    strategy = Strategy(
        zero=stage,
        shard=draw(st.sampled_from(groups)),
        precision=draw(st.sampled_from(["float32", "bfloat16"])),
        recompute=draw(st.sampled_from(["none", "unit", "keep_attention"])),
        accumulation=draw(st.sampled_from(ways)),
    )
    hardware = profiles.hardware(draw(st.sampled_from(["h100", "a100", "4090"])))
    return Case(SMALL, hardware, devices), Setting(strategy, draw(st.sampled_from([1, 4, 32])), count)


@given(chosen())
@settings(max_examples=examples(25), deadline=None)
def test_no_step_is_shorter_and_no_peak_lower_than_the_bounds_that_a_search_goes_by(
    chosen: tuple[Case, Setting],
) -> None:
    case, setting = chosen
    least, estimate = Least(case), case.estimate(setting)
    assert least.seconds(setting) <= estimate.seconds * (1 + 1e-9)
    assert least.bytes(setting) <= estimate.memory.peak


@given(chosen())
@settings(max_examples=examples(25), deadline=None)
def test_the_parts_of_a_step_are_the_step(chosen: tuple[Case, Setting]) -> None:
    """Whatever is simulated, and however many micro-batches are only counted: not more than few are."""
    case, setting = chosen
    estimate = case.estimate(setting)
    ops = case.ops(setting.strategy, setting.micro_batches)
    line, _ = case._timeline(setting, setting.micro_batches)
    assert sum(split(line).values()) == pytest.approx(line.last_step, rel=1e-9)
    assert estimate.seconds - estimate.bubble == pytest.approx(line.last_step, rel=0.01)
    assert estimate.sent == sum(op.sent for op in ops)


def test_half_the_network_is_no_faster_and_a_slow_rank_costs_what_it_computes() -> None:
    hardware = profiles.hardware("h100")
    setting = Setting(Strategy(zero=3, precision="bfloat16", recompute="unit"), 1, 1)
    slower = replace(hardware, between=replace(hardware.between, bandwidth=hardware.between.bandwidth / 2))
    plain = Case(LLAMA, hardware, 64).estimate(setting)
    half = Case(LLAMA, slower, 64).estimate(setting)
    late = Case(LLAMA, hardware, 64, slow_rank=1.2).estimate(setting)
    assert half.communication > 1.5 * plain.communication
    assert late.seconds == pytest.approx(plain.seconds + 0.2 * (plain.compute + plain.optimizer), rel=0.02)
    assert late.bubble > 0 and plain.bubble == pytest.approx(0, abs=0.05 * plain.seconds)


def test_a_hundred_thousand_devices_are_a_matter_of_group_sizes() -> None:
    """What a rank sends tends to twice the gradients, here with the padding that makes 100,000 shards of a bucket."""
    case = Case(LLAMA, profiles.hardware("h100"), 100_000)
    estimate = case.estimate(Setting(Strategy(precision="bfloat16"), 1, 1))
    padding = case.schedule(Strategy(precision="bfloat16")).layout.padding_bytes
    assert estimate.sent == pytest.approx(2 * (4 * LLAMA.shapes.numel + 2 * padding), rel=1e-3)


def test_what_binds_is_named() -> None:
    big = Case(LLAMA, profiles.hardware("h100"), 64)
    assert big.estimate(Setting(Strategy(zero=3, precision="bfloat16"), 1, 1)).bound == "compute"
    wires = replace(big.hardware, between=replace(big.hardware.between, bandwidth=1e8))
    slow = Case(LLAMA, wires, 64).estimate(Setting(Strategy(zero=3, precision="bfloat16"), 1, 1))
    assert slow.bound == "network" and slow.communication > slow.compute
    memory = replace(big.hardware, device=replace(big.hardware.device, bandwidth=2e10))
    assert Case(LLAMA, memory, 1).estimate(Setting(Strategy(precision="bfloat16"), 1, 1)).bound == "memory bandwidth"


def test_buffers_are_held_whole_at_every_stage() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    inputs = torch.empty(1, 64, device="meta")

    def held(zero: int) -> int:
        case = Case(of_module("mine", model, inputs), profiles.hardware("h100"), 8)
        return case.footprint(Setting(Strategy(zero=zero), 1, 1)).peak  # type: ignore[arg-type]

    without = [held(0), held(3)]
    model.register_buffer("table", torch.empty(1 << 20, dtype=torch.float64, device="meta"))
    assert [held(0), held(3)] == [each + (8 << 20) for each in without]
