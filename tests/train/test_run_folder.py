from __future__ import annotations

import contextlib
import json
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.train import run_folder
from paceline.train.run_folder import CONFIG, METRICS, RunFolder, check_run_folder, create_run_folder, find_run


@contextlib.contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes fails inside, as on a full disk."""
    old, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, most))


def test_a_folder_that_holds_something_is_never_used_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    check_run_folder(str(run))
    assert list(run.iterdir()) == []
    assert create_run_folder(str(run), "tiny").path == run
    for folder in (run, run / CONFIG):
        with pytest.raises(UserError, match="never overwritten: choose another name with --folder"):
            check_run_folder(str(folder))
        with pytest.raises(UserError, match="never overwritten"):
            create_run_folder(str(folder), "tiny")


def test_default_names_differ_and_latest_points_to_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = create_run_folder(None, "tiny"), create_run_folder(None, "tiny")
    assert first.path != second.path
    assert second.path.name.startswith(first.path.name[:8]) and "-tiny" in second.path.name
    assert (tmp_path / "runs" / "latest").resolve() == second.path.resolve()
    create_run_folder("runs/mine", "tiny")
    assert (tmp_path / "runs" / "latest").resolve() == (tmp_path / "runs" / "mine").resolve()
    create_run_folder("elsewhere/mine", "tiny")
    assert [item.name for item in (tmp_path / "elsewhere").iterdir()] == ["mine"]


@pytest.mark.parametrize("folder", [None, "runs/new", "runs/empty"])
def test_runs_that_begin_at_once_never_share_a_folder(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20260101-000000")
    together = threading.Barrier(8)

    def begin(_: int) -> Path | UserError:
        together.wait(20)
        try:
            return create_run_folder(folder, "tiny").path
        except UserError as error:
            return error

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(begin, range(8)))
    made = [result for result in results if isinstance(result, Path)]
    assert len(set(made)) == len(made) == (8 if folder is None else 1)
    assert all("never overwritten" in str(result) for result in results if isinstance(result, UserError))


def test_a_folder_that_cannot_be_made_is_a_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    for folder in (None, "runs/mine"):
        with pytest.raises(UserError, match="cannot be made"):
            create_run_folder(folder, "tiny")


def test_lines_are_written_whole_or_not_at_all_and_the_loss_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.append(METRICS, [{"step": 1, "text": "x" * 50}])
    with files_limited_to(100):
        folder.append(METRICS, [{"step": 2, "text": "y" * 50}, {"step": 3}])
        folder.append(METRICS, [{"step": 4, "text": "z" * 50}])
    folder.append(METRICS, [{"step": 5}])
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 5]
    assert capsys.readouterr().err.count("WARNING") == 1
    (problem,) = folder.describe_problems()
    assert METRICS in problem and "3 lines are missing" in problem


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n{"st')
    folder = RunFolder(tmp_path)
    folder.append(METRICS, [{"step": 2}])
    folder.append(METRICS, [{"step": 3}])
    assert (tmp_path / METRICS).read_text().splitlines() == ['{"step": 1}', '{"st', '{"step": 2}', '{"step": 3}']


def test_a_text_that_does_not_fit_leaves_the_old_one_and_no_other_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.write_text("config.yaml", "steps: 1\n")
    with files_limited_to(100):
        assert not folder.write_text("config.yaml", "#" * 200)
    assert [item.name for item in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "steps: 1\n"
    assert "config.yaml" in folder.problems
    assert folder.write_text("config.yaml", "steps: 2\n")
    assert not folder.problems


def test_a_run_that_is_not_there_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run folder nowhere; `paceline train` makes one"):
        find_run("nowhere")
    create_run_folder("runs/mine", "tiny")
    with pytest.raises(UserError, match=r"newest in runs/: .*mine"):
        find_run("nowhere")
    with pytest.raises(UserError, match=r"holds no model.safetensors \(weights are saved"):
        find_run("runs/mine", "model.safetensors")
