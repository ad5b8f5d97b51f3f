from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.models.config import ModelConfig
from paceline.models.presets import preset
from paceline.plan import profile_file, profiles
from paceline.plan.case import Case
from paceline.plan.estimate import Setting
from paceline.plan.hardware import Device, Hardware, Kernels, Link, Rates
from paceline.plan.published import traced
from paceline.plan.published.table import read
from paceline.plan.published.validate import Checked, check
from paceline.plan.run import Run
from paceline.plan.subject import transformer

CONFIG = ModelConfig(layers=4, width=256, heads=4, context=256, vocabulary=1024)

CPU = Hardware(
    Device("a cpu, 1 thread", 8 * 2**30, 1e10, {"float32": 5e10}, {"float32": 5e10}),
    Kernels(1e-6, 1.0, 1.0, 0.0, 0.5),
    2,
    Link(1e-5, 1e9),
    Link(1e-5, 1e9),
    framework=2 * 10**8,
    measured={"matmul float32": Rates(1e-6, per_flop=2e-11), "update": Rates(1e-5, per_byte=1e-10)},
)


def checked(tmp_path: Path, **cells: object) -> Checked:
    path = tmp_path / "own.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, cells.keys())
        writer.writeheader()
        writer.writerow(cells)
    return check(read(path))


@pytest.mark.parametrize(
    ("changes", "strategy"),
    [
        ({}, Strategy(precision="bfloat16")),
        ({"zero": 2, "shard": 2}, Strategy(zero=2, shard=2, precision="bfloat16")),
        ({"reduced": 2}, Strategy(precision="bfloat16", reduce_in_float32=False)),
        ({"dtype": "float32", "recompute": "unit"}, Strategy(recompute="unit")),
        (
            {"recompute": "unit", "recompute_share": 0.5},
            Strategy(precision="bf16", recompute="unit", recompute_every=2),
        ),
    ],
)
def test_a_run_has_the_strategy_that_shares_and_computes_alike(changes: dict[str, object], strategy: Strategy) -> None:
    assert traced.strategy(replace(Run(CONFIG, 8, 1), **changes)) == strategy  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 2}, "no tensor, pipeline or context ranks"),
        ({"pipeline": 2}, "no tensor, pipeline or context ranks"),
        ({"recompute": "attention"}, "recomputing attention alone"),
        ({"dtype": "float8"}, "does not compute in float8"),
    ],
)
def test_a_run_that_no_strategy_makes_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        traced.strategy(replace(Run(CONFIG, 8, 1), **changes))  # type: ignore[arg-type]


@pytest.mark.full
def test_rows_of_paceline_are_forecast_as_a_plan_is(tmp_path: Path) -> None:
    found = checked(
        tmp_path, source="paceline run", model="gpt2-124m", n_gpus=8, gpu="h100", seq_len=1024, micro_batch=4, zero=3,
        precision="bf16", step_time_s=0.1, peak_alloc_bytes=2e10,
    )  # fmt: skip
    ((_, step),), ((_, memory),) = found.times, found.memories
    case = Case(transformer("gpt2-124m", preset("gpt2-124m")), profiles.hardware("h100"), 8)
    plan = case.estimate(Setting(Strategy(zero=3, precision="bfloat16"), 4, 1))
    assert step.step.total == pytest.approx(plan.seconds)
    assert memory.peak_predicted == plan.memory.peak - plan.memory.framework
    assert memory.peak_error == pytest.approx(memory.peak_predicted / 2e10 - 1)


def test_a_cpus_runs_are_forecast_by_the_file_of_its_profile(tmp_path: Path) -> None:
    path = tmp_path / "Measured here.json"
    profile_file.write(path, CPU)
    cells = {"source": "paceline", "model": "nano", "n_gpus": 2, "seq_len": 64, "micro_batch": 2, "precision": "fp32"}
    found = checked(tmp_path, **cells, gpu=path, step_time_ms=10, peak_gib=0.4)
    plan = Case(transformer("nano", preset("nano"), 64, "cpu"), CPU, 2).estimate(Setting(Strategy(), 2, 1))
    assert found.times[0][1].step.total == pytest.approx(plan.seconds)
    assert found.memories[0][1].peak_predicted == plan.memory.peak
    ((_, reason),) = checked(tmp_path, **cells, gpu="cpu", step_time_ms=10).refused
    assert "'cpu'" in reason and "paceline plan --here" in reason
    ((_, reason),) = checked(tmp_path, **cells, gpu=tmp_path / "gone.json", step_time_ms=10).refused
    assert "gone.json: cannot be read" in reason


def test_a_profile_of_a_cpu_that_is_named_is_planned_with_a_cpus_kernels(tmp_path: Path) -> None:
    from paceline.plan.arguments import PlanArguments
    from paceline.plan.request import request

    profile_file.write(tmp_path / "cpu.json", CPU)
    asked = request(PlanArguments(model="nano", hardware=str(tmp_path / "cpu.json"), context=64), 2)
    cpu, cuda = (transformer("nano", preset("nano"), 64, kind).work(1, "float32") for kind in ("cpu", "cuda"))  # type: ignore[arg-type]
    assert asked.case.subject.work(1, "float32") == cpu != cuda
