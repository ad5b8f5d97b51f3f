from __future__ import annotations

import gc
import mmap
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.models.presets import PRESETS
from paceline.plan.case import Case
from paceline.plan.hardware import Device, Hardware, Kernels, Link
from paceline.plan.search import Found, search
from paceline.train import forecast
from paceline.train.config import TrainConfig

QUICK = Hardware(
    Device("quick", 10**9, 1e10, {"float32": 1e11}, {"float32": 1e11}),
    Kernels(1e-6, 1.0, 1.0, 0.0, 0.5),
    2,
    Link(1e-5, 1e9),
    Link(1e-5, 1e9),
)


PLAIN = TrainConfig(strategy=Strategy(gradients="sum"))


def world(ranks: int) -> Any:
    return SimpleNamespace(world_size=ranks, local_world_size=ranks, rank=0, device=torch.device("cpu"))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of a job whose ranks all say the same."""
    monkeypatch.setattr(forecast.pl, "all_gather_json", lambda value, _: [value])


@pytest.mark.usefixtures("alone")
def test_auto_takes_what_the_planner_finds_and_keeps_what_it_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "known_hardware", lambda _: QUICK)
    config = TrainConfig(plan="auto", batch=8, strategy=Strategy(gradients="sum", units=("blocks.*",)))
    said: list[str] = []
    chosen, _ = forecast.planned(config, PRESETS["tiny"], world(2), said.append)
    assert chosen.plan == "" and chosen.strategy.gradients == "sum" and chosen.strategy.units == ("blocks.*",)
    assert chosen.batch == 8 and 4 % chosen.micro_batch == 0
    assert "zero" in said[-1] and "ms a step predicted" in said[-1]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("left", "stages"),
    [
        ({}, {0, 1, 2, 3}),
        ({"packing": "flat"}, {0, 1}),
        ({"synchronize": "after", "bucket_mb": 5.0}, {0, 1}),
        ({"collective": "parameter_server"}, {0}),
        ({"share_parameters": True, "zero": 1}, {1, 2, 3}),
        ({"precision": "bfloat16", "reduce_in_float32": False}, {0, 1, 2, 3}),
        ({"wire": "int8", "accumulation": "hold", "zero": 3}, {0, 1, 2, 3}),
    ],
)
def test_what_the_planner_does_not_decide_goes_with_what_it_takes(
    left: dict[str, Any], stages: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    flops = {"float32": 1e11, "bfloat16": 2e11}
    device = replace(QUICK.device, peak=flops, ceiling=flops)
    monkeypatch.setattr(forecast, "known_hardware", lambda _: replace(QUICK, device=device))
    looked_at: list[Strategy] = []

    def searched(case: Case, samples: int, *, strategies: Sequence[Strategy]) -> Found:
        looked_at.extend(strategies)
        return search(case, samples, strategies=strategies)

    monkeypatch.setattr(forecast, "search", searched)
    config = TrainConfig(plan="auto", strategy=Strategy(gradients="sum", **left))
    chosen = forecast.planned(config, PRESETS["nano"], world(2), lambda _: None)[0].strategy
    assert {each.stage for each in looked_at} == stages
    kept = {name: value for name, value in left.items() if name not in forecast.DECIDED}
    assert all(getattr(each, name) == value for each in (*looked_at, chosen) for name, value in kept.items())


@pytest.mark.usefixtures("alone")
def test_settings_that_no_plan_goes_with_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "known_hardware", lambda _: QUICK)
    config = TrainConfig(plan="auto", strategy=Strategy(gradients="sum", zero=1, share_parameters=True))
    with pytest.raises(UserError, match="share_parameters"):
        forecast.planned(config, PRESETS["nano"], world(1), lambda _: None)


@pytest.mark.usefixtures("alone")
def test_what_was_asked_for_and_is_decided_by_the_planner_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "known_hardware", lambda _: QUICK)
    said: list[str] = []
    strategy = Strategy(gradients="sum", zero=3, shard=2, prefetch=7)
    forecast.planned(TrainConfig(plan="auto", strategy=strategy), PRESETS["nano"], world(2), said.append)
    assert any(line.startswith("note: strategy.prefetch 7 does not count, as plan auto decides it: ") for line in said)
    assert not any("micro_batch" in line for line in said), "it is the usual one"


@pytest.mark.usefixtures("alone")
def test_less_memory_makes_ranks_share_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(memory: int) -> Strategy:
        small = replace(QUICK, device=replace(QUICK.device, memory=memory))
        monkeypatch.setattr(forecast, "known_hardware", lambda _: small)
        return forecast.planned(PLAIN, PRESETS["small"], world(2), lambda _: None)[0].strategy

    roomy, tight = chosen(10**10), chosen(95 * 2**20)
    assert (tight.stage, tight.recompute) != (roomy.stage, roomy.recompute)


@pytest.mark.usefixtures("alone")
def test_where_nothing_fits_it_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(QUICK, device=replace(QUICK.device, memory=2**20))
    monkeypatch.setattr(forecast, "known_hardware", lambda _: tiny)
    with pytest.raises(UserError, match=r"over 2 ranks: zero 3, .* misses by least, needs \d+ MiB beside the 1 MiB"):
        forecast.planned(PLAIN, PRESETS["small"], world(2), lambda _: None)


def test_a_run_too_short_to_be_timed_tells_nothing() -> None:
    found = forecast.Forecast(0, lambda: QUICK)
    assert found.compared(PLAIN, PRESETS["nano"], world(1)) is None


def test_without_a_measured_machine_memory_alone_is_predicted() -> None:
    found = forecast.Forecast(100 * 2**20, lambda: None, [0.02, 0.03, 0.04], most=2**28)
    compared = found.compared(PLAIN, PRESETS["nano"], world(2))
    assert compared is not None
    assert compared["step_seconds"] == {"predicted": None, "measured": 0.03}
    assert compared["peak_bytes"]["predicted"] > 100 * 2**20
    told = forecast.in_lines(compared, 2)
    assert told[0].startswith("predicted: 5 MiB of memory beside the 100 MiB of a bare process, measured 156 MiB (-9")
    assert "--here" in told[1] and max(map(len, told)) <= 115
    known = forecast.Forecast(0, lambda: QUICK, [0.02], most=2**28).compared(PLAIN, PRESETS["nano"], world(2))
    assert known is not None and known["step_seconds"]["predicted"] > 0
    line = forecast.in_lines(known, 2)[1]
    assert "ms a step, measured 20.0" in line and "other work" not in line


def test_a_run_ends_with_the_machine_that_its_plan_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is kept nowhere if other work had its cores while it was measured."""
    monkeypatch.setattr(forecast, "known_hardware", lambda _: None)
    found = forecast.begin(world(2), recomputes=False, measured=QUICK)
    found.add(0.02, 0.0, torch.device("cpu"))
    compared = found.compared(PLAIN, PRESETS["nano"], world(2))
    assert compared is not None and compared["hardware"] == "quick" and compared["step_seconds"]["predicted"] > 0


def test_a_run_beside_other_work_says_so_where_its_forecast_is_told() -> None:
    found = forecast.Forecast(0, lambda: QUICK, [0.02, 0.05, 0.06], [0.1, 0.6, 0.7], 2**28)
    compared = found.compared(PLAIN, PRESETS["nano"], world(2))
    assert compared is not None and compared["crowded_fraction"] == 0.6
    told = forecast.in_lines(compared, 2)
    assert told[1].endswith(", while other work had the cores for 60 % of the time)") and max(map(len, told)) <= 110


def test_memory_is_compared_as_it_was_while_the_run_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sampled at the end is no part of it. Files' pages are on both sides, as they were then."""
    resident = {"Anon": 100 * 2**20, "Shmem": 2**20, "File": 50 * 2**20}
    monkeypatch.setattr(forecast, "_resident", resident.__getitem__)
    found = forecast.begin(world(1), recomputes=False)
    monkeypatch.setattr(forecast, "peak_memory", lambda _: 300 * 2**20)
    found.add(0.02, 0.0, torch.device("cpu"))
    monkeypatch.setattr(forecast, "peak_memory", lambda _: 900 * 2**20)
    resident |= {"Anon": 800 * 2**20, "File": 80 * 2**20}
    compared = found.compared(PLAIN, PRESETS["nano"], world(1))
    assert compared is not None and compared["peak_bytes"]["measured"] == 300 * 2**20
    assert compared["bytes_beside_model"] == 151 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell less")
def test_what_a_process_holds_is_told_by_kind() -> None:
    gc.collect()  # what other tests left would be given back in between
    before = forecast._resident("Anon")
    # From the system: the C library may have what other tests freed.
    with mmap.mmap(-1, 2**25, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        kept[::4096] = bytes(2**25 // 4096)
        assert forecast._resident("Anon") - before > 2**24
    assert forecast._resident("File") > 2**20 and forecast._resident("of no kind") == 0
