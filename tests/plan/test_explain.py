from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.core.strategy import Strategy
from paceline.models.presets import PRESETS
from paceline.plan import profiles
from paceline.plan.case import Case
from paceline.plan.estimate import Setting
from paceline.plan.explain import terms
from paceline.plan.subject import transformer
from tests.quick import full

GPT2 = transformer("gpt2-1.5b", PRESETS["gpt2-1.5b"])
STATES = ("parameters", "gradients", "optimizer")


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("stage", "more"),
    [(0, {}), (1, {}), (2, {}), (2, {"accumulation": "defer"}), (3, {}), (3, {"accumulation": "defer"})],
)
def test_formulas_of_states_give_the_bytes_that_are_shown(stage: int, more: Any, micro_batches: int) -> None:
    case = Case(GPT2, profiles.hardware("h200"), 8)
    estimate = case.estimate(Setting(Strategy(zero=stage, precision="bfloat16", **more), 1, micro_batches))
    formulas = {each.name: each.formula for each in terms(case, estimate)}
    for name in STATES:
        factor, shards = re.match(r"(\d+) P(?: / (\d+))?", formulas[name]).groups()  # type: ignore[union-attr]
        held = int(factor) * GPT2.shapes.numel / int(shards or 1)
        # Padding; and of gradients what autograd makes of a unit before it is copied in.
        beside = 0.1 * GPT2.shapes.numel if name == "gradients" else 0
        assert estimate.memory.by_kind[name] == pytest.approx(held, rel=0.01, abs=beside), (name, formulas[name])


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_collectives_that_are_told_are_those_of_a_step(stage: int, micro_batches: int) -> None:
    case = Case(GPT2, profiles.hardware("h200"), 8)
    estimate = case.estimate(Setting(Strategy(zero=stage, precision="bfloat16"), 1, micro_batches))
    told = [each.value for each in terms(case, estimate) if each.name in ("all_gather", "reduce_scatter", "all_reduce")]
    buffers = sum(float(re.match(r"([\d.]+) GiB a step in [\d,]+", value)[1]) for value in told)  # type: ignore[index]
    halves = 2 if stage == 0 else 1  # an all-reduce sends each part twice
    assert estimate.sent / 2**30 == pytest.approx(halves * buffers * 7 / 8, rel=0.02)


def number(text: str) -> float:
    """A number with a unit's prefix, as formulas have it: "3.35T"."""
    return float(text[:-1]) * {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[text[-1]]


@pytest.mark.parametrize("device", [full("a100"), "h100", full("v100")])
def test_formulas_of_kernels_give_the_times_that_are_shown(device: str) -> None:
    case = Case(GPT2, profiles.hardware(device), 8)
    setting = Setting(Strategy(zero=1, precision="float16" if device == "v100" else "bfloat16"), 4, 2)
    told = {each.name: each.formula for each in terms(case, case.estimate(setting))}
    found = re.search(
        r"matmuls (\S+)FLOP / \((\S+)FLOP/s x (\S+)\) \+ (\S+) passes over their (\S+)B / \((\S+)B/s x (\S+)\), and "
        r"attention (\S+)FLOP at (\S+) of that ceiling",
        told["multiplying"],
    )
    assert found, told["multiplying"]
    flops, ceiling, share, passes, matrices, bandwidth, reached, attention, of_it = found.groups()
    rate = number(bandwidth) * float(reached)
    multiplying = number(flops) / (number(ceiling) * float(share)) + float(passes) * number(matrices) / rate
    multiplying += number(attention) / (number(ceiling) * float(of_it))
    spent = case.spent(setting)
    assert spent.compute == pytest.approx(multiplying, rel=0.02)
    assert spent.moving == pytest.approx(number(told["moving"].split("B by")[0]) / rate, rel=0.02)
