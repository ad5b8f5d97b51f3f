from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import paceline as pl
from paceline.bench import cli, strategies
from paceline.bench.ranks import run_ranks
from paceline.core.errors import UserError
from paceline.core.strategy import SYSTEMS
from paceline.launch import pool
from paceline.launch.pool import RanksFailed
from paceline.measuring.cases import GROUPS, Case, Precision, System, Training
from paceline.models.presets import preset

DDP = "torch DDP: views, static graph"


def broken(case: Case, world: pl.World, precision: Precision) -> Training:
    raise ImportError("this library is not here")


def test_systems_run_beside_each_other_and_one_that_cannot_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = strategies.choose(strategies.systems("float32"), (DDP, "paceline: zero 0"))
    chosen = [replace(system, groups=GROUPS[:1]) for system in chosen]
    monkeypatch.setattr(strategies, "systems", lambda _: [*chosen, System("broken", "always", broken, GROUPS)])
    monkeypatch.setattr(strategies, "CASES", (Case("nano", preset("nano"), 1),))
    file = tmp_path / "rows.json"
    assert cli.main(["strategies", "--cases", "nano", "--rounds", "2", "--steps", "1", "--json", str(file)]) == 0

    written = json.loads(file.read_text())
    theirs, ours = written["rows"]
    assert (theirs["system"], theirs["ratio"], ours["system"], ours["setting"]) == (
        "torch DDP",
        1,
        "paceline",
        "zero 0",
    )
    for row in (theirs, ours):
        assert (row["group"], row["precision"]) == ("stage 0", "float32")
        assert row["median_ms"] > 0
        assert row["peak_bytes"] > row["base_bytes"] > 0
    parameters = sum(p.numel() for p in strategies.CASES[0].build().parameters())
    # A ring all-reduce of fp32 gradients sends 2 (N - 1) / N of them from each of N ranks.
    all_reduce = 4 * parameters
    assert theirs["wire_bytes"] == pytest.approx(all_reduce, rel=0.02), "counted on the sockets"
    assert ours["wire_bytes"] == pytest.approx(theirs["wire_bytes"], rel=0.02), "counted by the engine"

    (failure,) = written["failures"]
    assert failure["system"] == "broken"
    assert failure["reason"] == "ImportError: this library is not here"
    printed = capsys.readouterr().out
    assert f"ratio to {DDP}" in printed
    assert "broken: always did not run: ImportError: this library is not here" in printed


def test_only_groups_that_say_something_are_compared() -> None:
    found = strategies.systems("float32")

    def groups(*names: str) -> list[str]:
        return [group for group, _ in strategies.compared(strategies.choose(found, names))]

    assert groups("one process", DDP, "paceline: zero 0") == [GROUPS[0]]
    assert groups("one process", "paceline: zero 3", "paceline: zero 0") == [GROUPS[0], GROUPS[2]]
    assert groups("one process") == [GROUPS[0]]
    assert groups() == list(GROUPS)


@pytest.mark.parametrize("precision", get_args(Precision))
def test_systems_have_different_names_and_can_be_sent_to_a_rank(precision: Precision) -> None:
    found = strategies.systems(precision)
    assert len({system.label for system in found}) == len(found)
    assert [system.label for system in pickle.loads(pickle.dumps(found))] == [system.label for system in found]


def test_no_strategy_is_listed_twice() -> None:
    ours = {system.setting for system in strategies.systems("float32") if system.name == "paceline"}
    assert ours == {*strategies.OURS, *SYSTEMS} - {"buckets, overlapped"}
    assert SYSTEMS["buckets, overlapped"] == strategies.OURS["zero 0"]


def test_systems_are_chosen_by_name_or_with_their_setting() -> None:
    found = strategies.systems("float32")
    assert strategies.choose(found, ()) == found
    chosen = strategies.choose(found, ("DeepSpeed", DDP))
    assert {system.name for system in chosen} == {"DeepSpeed", "torch DDP"}
    assert [system.label for system in chosen if system.name == "torch DDP"] == [DDP]
    low = "paceline: zero 0, reduced in float32"
    assert strategies.choose(found, (DDP, low), strategies.systems("bfloat16")) == strategies.choose(found, (DDP,))
    with pytest.raises(UserError, match=r"--systems: expected some of one process;(.|\n)*got 'deepspeed'"):
        strategies.choose(found, ("deepspeed",))


def fail(rank_that_fails: int) -> None:
    if pl.init().rank == rank_that_fails:
        raise ValueError("on purpose")
    pl.barrier()


def test_a_rank_that_fails_is_named_and_no_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE_SECONDS", 0.2)
    with pytest.raises(RanksFailed, match=r"ValueError: on purpose") as caught:
        run_ranks(2, fail, 0)
    assert caught.value.failure.rank == 0
