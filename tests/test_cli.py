from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from paceline import cli
from paceline.cli import main
from paceline.command_line.options import options
from paceline.launch.screen import show
from paceline.train.command_line import MOST_USED
from paceline.train.config import TrainConfig
from tests.quick import full
from tests.train.processes import finished, paceline, program


def test_help_names_every_command_and_comes_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["help"], ["--help"], ["-h"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        for command in ("train", "sample", "report", "watch", "trace", "bench", "completion", "version"):
            assert f"\n  {command} " in out
    script = "import sys; from paceline.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


def test_the_launcher_does_not_import_torch() -> None:
    script = """
import sys
from paceline.train.command_line import parse_train_arguments
from paceline.launch.workers import launch
parse_train_arguments(["--workers", "2"])
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "command", ["train", "sample", "report", "watch", "trace", "plan", "check", "verify", "completion"]
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    page = capsys.readouterr().out
    assert f"usage: paceline {command}" in page
    assert not any(word in page for word in ("None", "Literal[", "Raises"))


def test_the_settings_that_people_use_fit_on_a_screen_and_all_others_are_a_flag_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pages = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as caught:
            main(["train", flag])
        assert caught.value.code == 0
        pages.append(capsys.readouterr().out)
    short, full = pages
    assert len(short.splitlines()) <= 40 and short.count("\n  --") == len(MOST_USED)
    assert max(map(len, (short + full).splitlines())) <= 80
    assert (
        all(option.flag in full or option.off in full for option in options(TrainConfig))
        and "--log.validate-batches-at-end" in full
    )
    assert "_every" not in full


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == main(["version"]) == 0
    assert capsys.readouterr().out.startswith("paceline 0.")


def test_other_failures_of_files_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_run", lambda _: Path("no-such-file-of-paceline's-own").read_text())
    with pytest.raises(FileNotFoundError):
        main(["sample", "run", "."])


def test_what_the_outputs_encoding_lacks_is_shown_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))

    def run(_: list[str]) -> int:
        show("loss \u20ac")
        return 0

    monkeypatch.setattr(cli, "_run", run)
    assert main(["train"]) == 0
    assert written.getvalue() == b"loss \\u20ac\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_output_that_finds_no_room_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as out:
        command = paceline("train", "--print-config")
        done = subprocess.run(command, cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("paceline: error: ") and "No space left" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "did you mean train?"),
        (["xyzzy"], "known: train, sample"),
        (["train", "--workers", "0"], "at least 1 worker"),
        (["train", "--workers", "two"], "--workers: expected a whole number or none, got 'two'"),
        (["train", "--threads", "100000"], "threads: expected 0 (share the cores out) to 4096, got 100000"),
        (["train", "--timeout", "1e300"], "timeout: expected 1 to 1e8 seconds, got 1e+300"),
        (["train", "--folder", "r\udcff"], "folder: expected a name, in UTF-8, got 'r\\udcff'"),
        (["train", "--timeout", "1e-9"], "timeout: expected 1 to 1e8 seconds, got 1e-09"),
        (["train", "--lr", "1"], "did you mean --optim.lr?"),
        (["train", "medium.txt"], "to train on this text: --data.path medium.txt"),
        (["train", "--strategy.zero", "3", "--strategy.shard", "2", "--workers", "3"], "cannot form groups of 2"),
        (["sample", "run", "--temperature", "-1"], "--temperature: expected 0 (the likeliest token) or above, got -1"),
        (["sample", "run", "--tokens", "-3"], "--tokens: expected 0 or more tokens, got -3"),
        (["sample", "run", "--prompt", "a\udcff"], "--prompt: expected UTF-8 text, got other bytes at character 1"),
        (["sample", "a" * 300], "aaa: File name too long; choose another"),
        (["train", "--folder", "a" * 300], "aaa: File name too long; choose another"),
        full(["train", "--resume=" + "a" * 300], "File name too long; choose another"),
        full(["plan", "--model", "a" * 300, "--devices", "2"], "aaa: File name too long; choose another"),
        (["bench", "strateges"], "did you mean strategies?"),
        (["train", "no-such.yaml"], "no-such.yaml: cannot be read"),
        (["report", "no-such-run"], "there is no run folder no-such-run"),
        (["trace", "no-such-run"], "there is no run folder no-such-run"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("paceline: error: ") and words in told.err and told.err.count("\n") == 1


def test_the_printed_configuration_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model.preset", "small", "--optim.lr", "3e-4", "--data.path", "a b.txt", "--log.wandb"]
    assert main(["train", *flags, "--print-config"]) == 0
    printed = capsys.readouterr().out
    values = yaml.safe_load(printed)
    assert values["model"]["layers"] == 6 and values["optim"]["lr"] == 3e-4 and values["log"]["wandb"] is True
    (tmp_path / "run.yaml").write_text(printed)
    assert main(["train", str(tmp_path / "run.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_sampling_without_a_run_says_so(tmp_path: Path) -> None:
    status, out, err = finished(paceline("sample", "runs/latest"), tmp_path)
    assert (status, out) == (2, "")
    assert err == "paceline: error: there is no run folder runs/latest; `paceline train` makes one\n"


def test_a_reader_that_leaves_early_sees_no_traceback(tmp_path: Path) -> None:
    with program(paceline("train", "--print-config"), tmp_path) as started:
        assert started.process.stdout is not None
        started.process.stdout.close()
        assert started.process.wait(20) == 128 + signal.SIGPIPE
        assert started.process.stderr is not None
        assert started.process.stderr.read() == ""
        started.process.stdout = None


def test_ctrl_c_while_text_is_read_ends_without_a_traceback(tmp_path: Path) -> None:
    # A configuration that is a pipe to which nobody writes: reading it takes for ever.
    os.mkfifo(tmp_path / "run.yaml")
    with program(paceline("train", "run.yaml"), tmp_path) as started:
        wait_until_open(tmp_path / "run.yaml")
        # Python acts on a signal before it begins to read or when that is interrupted, but not in between.
        time.sleep(0.5)
        started.process.send_signal(signal.SIGINT)
        status, out, err = started.finish()
    assert (status, out, err) == (130, "", "interrupted\n")


def wait_until_open(pipe: Path) -> None:
    """Returns when somebody has opened the pipe for reading, and leaves it open for writing."""
    deadline = time.monotonic() + 60
    while True:
        try:
            os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
