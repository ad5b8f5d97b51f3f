from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.cli import main
from paceline.core.check import Fault, ScheduleError
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.plan import check as module
from paceline.plan.check import check
from paceline.plan.models import meta_model


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_model_on_the_meta_device_is_checked_for_eight_ranks(zero: int) -> None:
    report = check(meta_model("gpt2-124m"), Strategy(zero=zero), devices=8, micro_batches=2)
    assert (report.ranks, report.micro_batches, report.faults) == (8, 2, ())
    assert report.collectives > 10
    assert report.pairs > 1000
    assert report.sent > 124e6 * 4


def test_a_model_that_is_one_module_is_checked_too() -> None:
    report = check(nn.Linear(4, 2), Strategy(zero=1), devices=2)
    assert report.ops == len(["forward", "backward", "copy_in", "reduce_scatter", "statistics", "all_reduce"]) + len(
        ["publish", "update", "all_gather"]
    )
    assert check(nn.Linear(4, 2), devices=1).collectives == 0


def test_what_cannot_be_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="3 ranks cannot form groups of 2"):
        check(nn.Linear(4, 2), Strategy(zero=2, shard=2), devices=3)
    wrong: tuple[tuple[Any, str], ...] = ((0, "0"), ("2", "'2'"), (2.5, "2.5"), (True, "True"))
    for devices, told in wrong:
        with pytest.raises(UserError, match=f"devices: expected a whole number, 1 or more, got {told}"):
            check(nn.Linear(4, 2), devices=devices)
    with pytest.raises(UserError, match=r"check: expected a model, a torch\.nn\.Module, got NoneType"):
        check(None, devices=2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"check: expected the strategy as a pl.Strategy, .*pl.Strategy\(\*\*strategy"):
        check(nn.Linear(4, 2), {"zero": 2}, devices=2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="matches no module"):
        check(nn.Linear(4, 2), Strategy(units=("blocks.*",)), devices=2)


def test_a_schedule_that_is_wrong_is_no_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module.check_schedules
    fault = Fault("race", 1, None, "copy_in of u0 may overwrite what is being reduced")
    monkeypatch.setattr(module, "check_schedules", lambda *given: replace(right(*given), faults=(fault,)))
    with pytest.raises(ScheduleError, match="rank 1: copy_in of u0 may"):
        check(nn.Linear(4, 2), devices=2)


def test_the_command_reads_what_train_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {preset: nano}\nbatch: 16\nmicro_batch: 2\nstrategy: {zero: 3}\n")
    assert main(["check", str(file), "--devices", "4", "--strategy.shard", "2"]) == 0
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first.endswith(" parameters, zero 3, 4 ranks, 2 micro-batches a step")
    assert second.startswith("right: ")
    assert fourth.startswith("a rank sends ")
    assert main(["check", str(file), "--devices", "4", "--strategy.shard", "2", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ranks"], report["micro_batches"], report["faults"]) == (4, 2, [])
    assert f"{report['ops']:,} ops of each rank, {report['collectives']:,} of them collectives" in second
    assert third.endswith(f": {report['unplanned']:,} ops more")
    assert main(["check", str(file), "--devices", "17"]) == 2
    assert "17 ranks" in capsys.readouterr().err


def test_the_command_names_every_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = module.check_schedules
    faults = tuple(Fault("race", rank, None, "update of optimizer may overwrite") for rank in range(2))
    monkeypatch.setattr(module, "check_schedules", lambda *given: replace(right(*given), faults=faults))
    assert main(["check", "--devices", "2"]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "wrong, which is a mistake in paceline:",
        "rank 0: update of optimizer may overwrite",
        "rank 1: update of optimizer may overwrite",
    ]
    assert main(["check", "--devices", "2", "--json", "-"]) == 1
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 2


def test_nothing_is_allocated() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(4)))
    assert check(model, Strategy(zero=3), devices=64).memory.total > 4 * 4 * 10**10 // 64
