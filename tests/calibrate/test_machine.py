from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.calibrate import machine, rank
from paceline.calibrate.probe import fitted, step_seconds
from paceline.core.strategy import Strategy
from paceline.models.transformer import Transformer
from paceline.plan.hardware import Device, Hardware, Kernels, Link, Rates
from paceline.plan.stages import shapes
from paceline.plan.trace import trace

HERE = Hardware(
    Device("this", 10**9, 1e10, {"float32": 1e11}, {"float32": 1e11}),
    Kernels(1e-6, 1.0, 1.0, 0.0, 0.5),
    2,
    Link(1e-5, 1e9),
    Link(1e-5, 1e9),
    measured={"memory float32": Rates(1e-6, per_byte=1e-10), "attention float32": Rates(1e-6, 1e-11)},
)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of ranks that were measured with, instead of measuring."""
    asked: list[int] = []

    def instead(ranks: int, seconds: float) -> Hardware:
        asked.append(ranks)
        return HERE

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "measured_here", instead)
    return asked


def test_a_machine_is_measured_once_for_each_number_of_ranks(measured: list[int]) -> None:
    assert machine.here(2) == machine.here(2) == HERE
    machine.here(1)
    machine.here(1, anew=True)
    assert measured == [2, 1, 1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "other"}'])
def test_a_damaged_measurement_is_told_and_made_anew(measured: list[int], text: str) -> None:
    machine.here(2)
    machine.cached(2).write_text(text)
    told: list[str] = []
    assert machine.here(2, report=told.append) == HERE
    assert measured == [2, 2] and "measured anew" in told[0]
    assert machine.here(2) == HERE


def test_another_machine_or_torch_has_a_measurement_of_its_own(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = machine.cached(2)
    monkeypatch.setattr(machine.torch, "__version__", "9.9")
    assert machine.cached(2) != before
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert len({before, machine.cached(2), machine.cached(1)}) == 3


def test_a_folder_that_cannot_be_written_costs_the_next_measurement_alone(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told: list[str] = []
    assert machine.here(2, report=told.append) == HERE
    assert "measures again" in told[-1]


def test_the_hosts_time_and_contention_are_those_that_the_steps_show() -> None:
    model = Transformer(rank.PROBE.model)
    work, layout = trace(model, rank.PROBE.batch, device="cpu"), shapes(model)
    true = replace(HERE, hooks=5e-6 * 1.3**6, kernels=replace(HERE.kernels, contention=0.5))
    steps = {stage: step_seconds(layout, work, true, Strategy(zero=stage), 2) for stage in (0, 1, 2, 3)}
    found = fitted(HERE, steps, 2)
    assert found.hooks == pytest.approx(true.hooks)
    assert found.kernels.contention == 0.5
