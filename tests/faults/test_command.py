"""Faults as a user brings them about, and a harness that is itself interrupted, killed or does not strike."""

from __future__ import annotations

import json
import multiprocessing.util
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.faults import command
from paceline.faults.command import main
from paceline.faults.fault import Fault
from paceline.faults.outcome import Curve, curve
from paceline.faults.table import FAULTS
from paceline.faults.training import LackingError, Training
from tests.quick import full
from tests.ranks import RankPool
from tests.train.processes import PATIENCE, paceline, program, trained


@pytest.fixture(autouse=True)
def own_temporary_folder(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Those of the pool, and of what its ranks are forked from, are made before.
    multiprocessing.util.get_temp_dir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def undisturbed_by_ranks(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that a disturbed one is held against is made by ranks that are there: starting some takes longest."""

    def undisturbed(folder: Path, steps: int) -> Curve:
        training = Training(folder / "undisturbed", folder / "text", steps)
        flags = training.command()[training.command().index("train") + 1 :]
        status, _, err = trained(ranks, 2, training.folder, flags)
        assert (status, err) == (0, "")
        return curve(training.run)

    monkeypatch.setattr(command, "_undisturbed", undisturbed)
    # Twice as many as are done when the fault strikes, and some more.
    monkeypatch.setattr(command, "FAULTS", tuple(replace(fault, steps=60) for fault in FAULTS))


@pytest.mark.full
@pytest.mark.usefixtures("undisturbed_by_ranks")
def test_a_fault_strikes_and_the_training_is_as_if_it_had_not(tmp_path: Path) -> None:
    held(tmp_path, "flip")


@pytest.mark.full
def test_another_one_beside_a_run_of_its_own(tmp_path: Path) -> None:
    held(tmp_path, "pause")


def test_what_strikes_as_is_expected_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a training, of which tests/train/test_failover.py and test_resume.py have some."""
    calm = Fault("calm", "nothing is done", "nothing is to be seen", lambda training: "all is calm", trains=False)
    monkeypatch.setattr(command, "FAULTS", (calm,))
    held(tmp_path, "calm")


def held(tmp_path: Path, name: str) -> None:
    assert main(["run", name, "--json", str(tmp_path / "results.json")]) == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert (row["fault"], row["result"]) == (name, "passed") and row["words"] and row["seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.full
def test_what_does_not_strike_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_undisturbed", lambda *_: {})
    monkeypatch.setattr("paceline.faults.processes.os.kill", lambda *_: None)
    assert main(["run", "kill-worker"]) == 1
    assert "the training was at its end before anything struck it" in capsys.readouterr().out


def test_what_the_machine_lacks_is_said_and_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FAULTS", tuple(replace(fault, missing=lambda: "a moon") for fault in FAULTS))
    assert main(["run", "--all"]) == 0
    told = capsys.readouterr().out
    assert told.count("needs a moon") == len(FAULTS)
    assert told.splitlines()[-1] == f"0 passed, 0 FAILED, {len(FAULTS)} skipped"


def test_what_turns_out_to_be_lacking_is_skipped_and_what_is_gone_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {"lacking": LackingError("the right to mount"), "gone": ProcessLookupError(3, "No such process")}

    def raising(error: Exception) -> Callable[[Training], str]:
        def act(_: Training) -> str:
            raise error

        return act

    faults = tuple(Fault(name, "", "", raising(error), trains=False) for name, error in errors.items())
    monkeypatch.setattr(command, "FAULTS", faults)
    assert main(["run"]) == 1
    told = capsys.readouterr().out
    assert "needs the right to mount" in told and "No such process" in told
    assert told.splitlines()[-1] == "0 passed, 1 FAILED, 1 skipped"


def test_all_are_listed_with_what_they_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json", str(tmp_path / "faults.json")]) == 0
    rows = json.loads((tmp_path / "faults.json").read_text())["faults"]
    assert [row["fault"] for row in rows] == [fault.name for fault in FAULTS]
    told = capsys.readouterr().out
    assert all(f"{fault.done}: {fault.expected}" in told for fault in FAULTS)


@pytest.mark.full
def test_a_save_may_be_killed_at_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() or shutil.which("strace") is None:
        pytest.skip("needs root and strace")
    assert main(["run", "kill-saving"]) == 0
    assert "this one after 0" not in capsys.readouterr().out


def test_all_are_in_the_documentation() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "reliability.md").read_text()
    assert [fault.name for fault in FAULTS if f"`{fault.name}`" not in page] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["run", "kill-wroker"], "did you mean kill-worker"), (["run", "flip", "--all"], "leave it out to run flip")],
)
def test_what_there_is_not_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        main(arguments)


@pytest.mark.parametrize("number", [full(signal.SIGINT), full(signal.SIGKILL)])
def test_nothing_is_left_of_a_harness_that_ends_in_the_midst(number: signal.Signals, tmp_path: Path) -> None:
    with program(paceline("faults", "run", "kill-worker"), tmp_path, {"TMPDIR": str(tmp_path)}) as started:
        deadline = time.monotonic() + PATIENCE
        while not list(tmp_path.glob("paceline-faults-*/kill-worker/run/metrics.jsonl")):
            assert started.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert len(started.alive()) >= 3
        os.kill(started.process.pid, number)
        started.finish()
        started.wait_until_gone(PATIENCE)
    if number == signal.SIGINT:
        assert list(tmp_path.iterdir()) == []
