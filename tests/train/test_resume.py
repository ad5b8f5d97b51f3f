"""A run that stopped, however it did, goes on as if it had not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.checkpoint.folder import read_manifest
from paceline.core.strategy import Strategy
from tests.quick import full
from tests.ranks import RankPool
from tests.train.processes import called, metrics, paceline, program, trained

FLAGS = ("--log.every", "1", "--log.validate-every", "0", "--log.validate-batches", "1")
SHORT = ("--steps", "14", *FLAGS)


def curve(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; of a step that was repeated, the last."""
    return {
        int(line["step"]): (line["train/loss"], line["train/grad_norm"])
        for line in metrics(run)
        if "train/loss" in line
    }


@pytest.fixture(scope="module")
def undisturbed(ranks: RankPool, nano: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks from beginning to end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    status, _, err = trained(ranks, 2, folder, [*nano, *SHORT])
    assert (status, err) == (0, "")
    return folder / "runs" / "latest"


@pytest.mark.parametrize("precision", ["float32", full("float16"), full("bfloat16")])
def test_the_same_ranks_go_on_to_the_bit(ranks: RankPool, nano: list[str], tmp_path: Path, precision: str) -> None:
    flags = [*nano, *SHORT, "--strategy.precision", precision, "--checkpoint.every", "5", "--checkpoint.keep", "9"]
    assert trained(ranks, 2, tmp_path, [*flags, "--folder", "whole"])[0] == 0
    names = [path.name for path in sorted((tmp_path / "whole" / "checkpoints").iterdir())]
    assert names == ["step-00000005", "step-00000010", "step-00000014"]
    whole = curve(tmp_path / "whole")
    # As it would be if the last seven steps had not been taken.
    resumed = [*flags, "--resume", str(tmp_path / "whole" / "checkpoints" / "step-00000005")]
    status, out, err = trained(ranks, 2, tmp_path, resumed)
    assert (status, err) == (0, "") and "going on after step 5" in out
    assert curve(tmp_path / "whole") == whole
    events = [json.loads(line)["step"] + 1 for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    assert set(events) == {14}, "events have the run's steps, whoever goes on with it"
    assert [int(line["step"]) for line in metrics(tmp_path / "whole") if "run/resumed_from" in line] == [5]
    replaced = tmp_path / "whole" / "checkpoints" / "replaced"
    assert [path.name for path in sorted(replaced.iterdir())] == names[1:], "what was there is not lost"


@pytest.mark.full
@pytest.mark.parametrize(("n", "zero"), [(3, "3"), full(1, "0"), full(4, "1")])
def test_other_ranks_go_on_with_the_same_samples(
    ranks: RankPool, nano: list[str], tmp_path: Path, undisturbed: Path, n: int, zero: str
) -> None:
    flags = [*nano, *SHORT, "--checkpoint.every", "6", "--checkpoint.keep", "9", "--folder", "first"]
    assert trained(ranks, 2, tmp_path, flags)[0] == 0
    path = tmp_path / "first" / "checkpoints" / "step-00000006"
    status, _, err = trained(ranks, n, tmp_path, ["--resume", str(path), "--strategy.zero", zero])
    assert (status, err) == (0, "")
    found, expected = curve(tmp_path / "first"), curve(undisturbed)
    assert found.keys() == expected.keys()
    for step, figures in expected.items():
        assert found[step] == pytest.approx(figures, rel=2e-4), step


def test_the_same_command_goes_on_after_kill_9(
    ranks: RankPool, nano: list[str], tmp_path: Path, undisturbed: Path
) -> None:
    flags = [*nano, *SHORT, "--checkpoint.every", "2", "--workers", "2", "--resume", "auto"]
    with program(paceline("train", *flags), tmp_path) as started:
        while len(list(tmp_path.glob("runs/latest/checkpoints/*/manifest.json"))) < 2:
            assert started.process.poll() is None, started.process.communicate()
            time.sleep(0.02)
        os.kill(started.rank(0), signal.SIGKILL)
        started.finish()
    (run,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    if max(curve(run)) < 14:
        status, out, err = trained(ranks, 2, tmp_path, flags)
        assert status == 0, err
        assert "going on after step" in out
    (run,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    found = curve(run)
    for step, figures in curve(undisturbed).items():
        assert found[step] == pytest.approx(figures, rel=2e-4), step
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step-00000012", "step-00000014"], "older ones, and unfinished ones, are gone"


@pytest.mark.full
def test_a_run_that_is_going_on_is_refused_and_its_stop_saves_all_that_resume_needs(
    nano: list[str], tmp_path: Path
) -> None:
    command = paceline("train", *nano, *FLAGS, "--steps", "100000", "--checkpoint.every", "9", "--folder", "stopped")
    with program(command, tmp_path) as started:
        while not list(tmp_path.glob("stopped/checkpoints/*/manifest.json")):
            assert started.process.poll() is None, started.process.communicate()
            time.sleep(0.02)
        status, _, err = called(tmp_path, "train", "--resume", "stopped", "--steps", "200000")
        assert status == 2 and "stopped is in use: another process trains there" in err
        started.process.send_signal(signal.SIGTERM)
        status, out, _ = started.finish()
    assert status == 143 and "paceline train --resume stopped" in out
    last = max(curve(tmp_path / "stopped"))
    status, out, err = called(tmp_path, "train", "--resume", "stopped", "--steps", str(last + 2))
    assert (status, err) == (0, "") and f"going on after step {last}" in out
    assert max(curve(tmp_path / "stopped")) == last + 2


def test_the_same_command_with_a_folder_goes_on_in_it(nano: list[str], tmp_path: Path) -> None:
    command = ["train", *nano, *FLAGS, "--folder", "mine", "--resume", "auto", "--steps"]
    for steps, words in (("2", "step 2/2"), ("4", "going on after step 2")):
        status, out, err = called(tmp_path, *command, steps)
        assert (status, err) == (0, "") and words in out
    status, _, err = called(tmp_path, *command, "4")
    assert status == 2 and "mine has done its 4 steps" in err


def test_the_same_command_goes_on_with_what_the_planner_chose(
    nano: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Strategy(zero=1, bucket_mb=3.0, gradients="sum")
    monkeypatch.setattr(
        "paceline.train.loop.planned", lambda config, *_: (replace(config, strategy=chosen, micro_batch=1), None)
    )
    command = ["train", *nano, *FLAGS, "--plan", "auto", "--folder", "mine", "--resume", "auto", "--steps"]
    assert called(tmp_path, *command, "2")[0] == 0
    monkeypatch.delattr("paceline.train.loop.planned")
    status, out, err = called(tmp_path, *command, "4")
    assert (status, err) == (0, "") and "going on after step 2" in out
    assert "plan: auto is for new runs" in out
    manifest = read_manifest(tmp_path / "mine" / "checkpoints" / "step-00000004")
    assert (manifest.strategy["zero"], manifest.strategy["bucket_mb"]) == (1, 3.0)


@pytest.mark.parametrize("killed", ["before it wrote its settings", "before its first checkpoint"])
def test_a_folder_of_a_run_that_was_killed_early_needs_no_hand(nano: list[str], tmp_path: Path, killed: str) -> None:
    command = ["train", *nano, *FLAGS, "--steps", "2", "--folder", "mine", "--resume", "auto"]
    assert called(tmp_path, *command)[0] == 0
    expected = curve(tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine" / "checkpoints")
    if killed == "before it wrote its settings":
        for path in (tmp_path / "mine").iterdir():
            path.unlink()
        (tmp_path / "mine" / "config.yaml").touch()
    status, _, err = called(tmp_path, *command)
    assert (status, err) == (0, "")
    assert curve(tmp_path / "mine") == expected
    assert list(tmp_path.glob("mine/checkpoints/step-00000002/manifest.json"))


@pytest.fixture(scope="module")
def done(ranks: RankPool, nano: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("done")
    assert trained(ranks, 1, folder, [*nano, "--steps", "2", *FLAGS, "--folder", "run"])[0] == 0
    return folder / "run"


REFUSED = {
    "it is done": ((), "has done its 2 steps: give more --steps"),
    "another model": (("--steps", "4", "--model.width", "32"), "model.width: 64, now 32"),
    "other samples": (("--steps", "4", "--seed", "1"), "seed: 0, now 1"),
    "another batch": (("--steps", "4", "--batch", "4"), "batch: 8, now 4"),
    "another folder": (("--steps", "4", "--folder", "elsewhere"), "goes on in its own folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_on_is_said_with_what_differs(done: Path, tmp_path: Path, case: str) -> None:
    flags, words = REFUSED[case]
    status, _, err = called(tmp_path, "train", "--resume", str(done), *flags)
    assert status == 2 and words in err and "Traceback" not in err


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    status, _, err = called(tmp_path, "train", "--resume", "nowhere")
    assert status == 2 and "nowhere is no run's folder and no checkpoint of one" in err


@pytest.mark.parametrize(
    ("name", "why"), [("checkpoints/step-00000001", "is not there"), ("model.safetensors", "is a file")]
)
def test_what_is_no_checkpoint_of_a_run_is_said(done: Path, tmp_path: Path, name: str, why: str) -> None:
    status, _, err = called(tmp_path, "train", "--resume", str(done / name), "--steps", "4")
    assert status == 2 and f"{done / name} {why}" in err, "and the latest is not taken in its place"


def test_a_checkpoint_may_have_another_name(done: Path, tmp_path: Path) -> None:
    run = shutil.copytree(done, tmp_path / "run")
    (run / "checkpoints" / "step-00000002").rename(run / "best")
    status, out, err = called(tmp_path, "train", "--resume", "run/best", "--steps", "3")
    assert (status, err) == (0, "") and "going on after step 2" in out


def test_a_folder_that_is_read_only_is_said_before_training(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, **_: Path(path) != done)
    status, _, err = called(tmp_path, "train", "--resume", str(done), "--steps", "4")
    assert status == 2 and f"run folder {done} cannot be written to" in err


def test_workers_go_on_in_a_folder_that_the_run_was_given(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr("paceline.launch.workers.launch", lambda _, workers, threads: started.append(workers) or 0)
    for resume in (str(done), "auto"):
        flags = ("--folder", str(done), "--steps", "4", "--workers", "2", "--resume", resume)
        assert called(tmp_path, "train", *flags) == (0, "", "")
    assert started == [2, 2], "the folder is the run's own"


@pytest.mark.parametrize("how", ["turned round", "in another order"])
def test_text_that_has_changed_is_refused(
    ranks: RankPool, text: Path, nano: list[str], tmp_path: Path, undisturbed: Path, how: str
) -> None:
    (tmp_path / "text").mkdir()
    for path in text.iterdir():
        (tmp_path / "text" / path.name).write_text(path.read_text())
    flags = [*nano, "--data.path", str(tmp_path / "text"), *FLAGS, "--folder", "run", "--steps"]
    # Neither the tokenizer nor the number of tokens tells of another order.
    flags[:0] = ["--data.tokenizer", str(undisturbed / "tokenizer.json")]
    assert trained(ranks, 1, tmp_path, [*flags, "2"])[0] == 0
    paths = sorted((tmp_path / "text").iterdir())
    contents = [path.read_text() for path in paths]
    new = [content[::-1] for content in contents] if how == "turned round" else contents[::-1]
    for path, content in zip(paths, new, strict=True):
        path.write_text(content)
    status, _, err = called(tmp_path, "train", "--resume", "run", "--steps", "4")
    assert status == 2 and "the text has changed since" in err


@pytest.mark.parametrize("every", ["soon", "5x", "-3"])
def test_a_time_that_is_none_is_said(tmp_path: Path, every: str) -> None:
    status, _, err = called(tmp_path, "train", f"--checkpoint.every={every}")
    assert status == 2 and "checkpoint.every" in err and "15m" in err
