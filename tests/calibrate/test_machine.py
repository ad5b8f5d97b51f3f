from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.calibrate import machine, rank
from paceline.calibrate.probe import IN_STEPS, fitted, in_steps, step_seconds
from paceline.calibrate.rank import Measured
from paceline.comm.world import World
from paceline.core.errors import UserError
from paceline.core.strategy import Stage, Strategy
from paceline.launch.cores import threads_per_rank
from paceline.measuring.cases import Case
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

    def instead(ranks: int, seconds: float) -> tuple[Hardware, float]:
        asked.append(ranks)
        return HERE, 0.0

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "measured_here", instead)
    return asked


def test_a_machine_is_measured_once_for_each_number_of_ranks(measured: list[int]) -> None:
    assert machine.here(2) == machine.here(2) == HERE
    machine.here(1)
    machine.here(1, anew=True)
    assert measured == [2, 1, 1]


@pytest.mark.full
def test_a_machine_too_busy_to_be_measured_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LIMIT", 0.0)
    monkeypatch.setattr("paceline.launch.pool.STACKS_SECONDS", 0.0)
    with pytest.raises(UserError, match=r"within 0 s; .* try again when .*--hardware"):
        machine.measured_here(1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "other"}'])
def test_a_damaged_measurement_is_told_and_made_anew(measured: list[int], text: str) -> None:
    machine.here(2)
    machine.cached(2, threads_per_rank(0, 2)).write_text(text)
    told: list[str] = []
    assert machine.here(2, report=told.append) == HERE
    assert measured == [2, 2] and "measured anew" in told[0]
    assert machine.here(2) == HERE


def test_another_machine_or_torch_has_a_measurement_of_its_own(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = machine.cached(2, 1)
    assert len({before, machine.cached(1, 1), machine.cached(2, 2)}) == 3
    monkeypatch.setattr(machine.torch, "__version__", "9.9")
    assert machine.cached(2, 1) != before


def test_ranks_of_other_threads_do_not_go_by_a_measurement_nor_replace_it(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threads_per_rank(0, 1)
    machine.here(1)
    assert machine.kept(1, threads) == HERE and machine.kept(1, threads + 1) is None
    slower = Measured({"gelu float32": Rates(1.0)}, 0.0, {"float32": 1e9}, 1e9, 0, 0.0, {})
    monkeypatch.setattr(machine, "measure_in", lambda *_: slower)
    monkeypatch.setattr(machine, "fitted", lambda hardware, *_: hardware)
    monkeypatch.setattr(machine.pl, "all_gather_json", lambda value, _: [value])
    monkeypatch.setattr(machine.torch, "get_num_threads", lambda: threads + 1)
    machine.measured_in_job(World())
    assert machine.kept(1, threads) == HERE and machine.kept(1, threads + 1) is not None


def test_what_was_measured_beside_other_work_is_told_and_not_kept(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "measured_here", lambda *_: (HERE, 0.6))
    told: list[str] = []
    assert machine.here(2, report=told.append) == HERE
    assert "for 60 % of the time in which this machine was measured other work had its cores" in told[-1]
    assert machine.kept(2, threads_per_rank(0, 2)) is None


@pytest.mark.parametrize(
    ("waited", "ranks_a_core", "by_others"), [(0.0, 1.0, 0.0), (0.5, 1.0, 0.5), (0.5, 2.0, 0.0), (0.75, 2.0, 0.5)]
)
def test_ranks_that_wait_for_each_other_are_no_other_work(waited: float, ranks_a_core: float, by_others: float) -> None:
    assert rank._by_others(waited, ranks_a_core) == pytest.approx(by_others)


def test_a_folder_that_cannot_be_written_costs_the_next_measurement_alone(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told: list[str] = []
    assert machine.here(2, report=told.append) == HERE
    assert "measures again" in told[-1]


@pytest.mark.parametrize("named", ["", "relative", "/" + 300 * "x"])
def test_a_user_without_a_folder_for_caches_has_no_measurement(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of every training, which looks for one."""

    def homeless(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert machine.kept(2, 1) is None
    assert machine.cached(2, 1).is_absolute()


@pytest.mark.full
def test_what_a_step_adds_to_operators_is_what_the_steps_show() -> None:
    bare = replace(
        HERE,
        measured=dict(HERE.measured)
        | {f"{kind} bfloat16": Rates(1e-6, 2e-12, 1e-11) for kind in ("matmul", "attention", "memory")},
    )
    slower = in_steps(in_steps(bare, "float32", IN_STEPS[20]), "bfloat16", IN_STEPS[30])
    true = replace(slower, hooks=2.4e-5, kernels=replace(HERE.kernels, contention=0.5))

    def took(case: Case, stage: Stage, precision: str) -> float:
        model = Transformer(case.model)
        work = trace(model, case.batch, precision=precision, device="cpu")
        strategy = Strategy(zero=stage, precision=precision)  # type: ignore[arg-type]
        return step_seconds(shapes(model), work, true, strategy, 2)

    stages: tuple[Stage, ...] = (0, 1, 2, 3)
    steps: dict[str, dict[Stage, float]] = {
        "float32": {stage: took(rank.PROBE, stage, "float32") for stage in stages},
        "bfloat16": {0: took(rank.PROBE, 0, "bfloat16")},
    }
    found = fitted(bare, took(rank.EMPTY, 0, "float32"), steps, 2)
    assert found.kernels.contention == 0.5
    for name in ("attention float32", "matmul bfloat16"):
        assert found.measured[name].per_flop == pytest.approx(true.measured[name].per_flop, rel=0.03)
    # What a step adds to operators of next to nothing is taken for the host's.
    assert found.hooks == pytest.approx(true.hooks, rel=0.3)


def test_where_ranks_are_more_than_cores_each_computes_for_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "available_cores", lambda: 2)
    monkeypatch.setattr(rank, "clock", lambda: time.thread_time)
    world = SimpleNamespace(local_world_size=4)
    assert rank._crowding(world) == 2.0  # type: ignore[arg-type]
    world.local_world_size = 1
    assert rank._crowding(world) == 1.0  # type: ignore[arg-type]
    # What went by on the clock has the others' turns in it.
    monkeypatch.setattr(rank, "clock", lambda: time.perf_counter)
    world.local_world_size = 4
    assert rank._crowding(world) == 1.0  # type: ignore[arg-type]


def test_large_buffers_are_sent_from_memory_and_small_ones_as_they_were_left(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    cold = SimpleNamespace(add_=lambda _: written.append(rank.BEYOND_CACHES))
    monkeypatch.setattr(rank.torch, "ones", lambda numel: cold if 4 * numel == rank.BEYOND_CACHES else None)
    monkeypatch.setattr(rank.pl, "barrier", lambda: None)
    monkeypatch.setattr(rank.pl, "all_gather_json", lambda times: [times])
    runs: list[tuple[int, int]] = []
    transport = SimpleNamespace(run=lambda name, buffer, _: runs.append((buffer.nbytes, len(written))))
    rank._collective(transport, "all_gather", torch.zeros(rank.LARGE // 4 - 1), 2)  # type: ignore[arg-type]
    rank._collective(transport, "all_gather", torch.zeros(rank.LARGE // 4), 2)  # type: ignore[arg-type]
    # The first of each does not count; before each of the large ones something else was written.
    assert runs == [(rank.LARGE - 4, 0)] * 3 + [(rank.LARGE, number) for number in (1, 2, 3)]
