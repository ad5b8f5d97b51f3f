from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from paceline.cli import main
from paceline.train.config import TrainConfig
from paceline.train.sections import LogConfig
from paceline.train.summary import next_steps
from tests.launch.terminal import on_terminal
from tests.quick import full
from tests.ranks import RankPool
from tests.train.processes import (
    called,
    finished,
    metrics,
    paceline,
    torchrun,
    trained,
)

SHORT = (
    *("--steps", "12", "--log.every", "5", "--log.validate-every", "6", "--log.validate-batches", "1"),
    *("--log.validate-batches-at-end", "3"),
)
LONG = ("--steps", "1000000", "--log.every", "1", "--log.validate_every", "0")


@pytest.fixture(scope="module")
def run(nano: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run of two workers, and what it showed."""
    folder = tmp_path_factory.mktemp("finished")
    status, out, err = finished(paceline("train", *nano, *SHORT, "--workers", "2"), folder)
    assert (status, err) == (0, "")
    return folder / "runs" / "latest", out


def test_a_run_folder_holds_all_of_the_run(run: tuple[Path, str]) -> None:
    path, _ = run
    names = {item.name for item in path.iterdir()}
    assert names == {
        "checkpoints", "config.yaml", "environment.json", "events.jsonl", "metrics.jsonl", "model.safetensors",
        "plan.json", "tokenizer.json",
    }  # fmt: skip
    compared = json.loads((path / "plan.json").read_text())
    assert compared["step_seconds"]["measured"] > 0
    # Close enough that a kind of memory that is left out, or counted twice, would show.
    assert compared["peak_bytes"]["predicted"] == pytest.approx(compared["peak_bytes"]["measured"], rel=0.4)
    assert "predicted: " in run[1]
    facts = json.loads((path / "environment.json").read_text())
    assert facts["ranks"] == 2 and facts["versions"]["torch"] and facts["cores"] >= 1 and "--steps" in facts["command"]
    assert yaml.safe_load((path / "config.yaml").read_text())["steps"] == 12


def test_metrics_have_the_promised_keys_and_steps(run: tuple[Path, str]) -> None:
    lines = metrics(run[0])
    assert all("step" in line and "time" in line for line in lines)
    training = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in training] == [1, 5, 10, 12]
    for line in training:
        assert {
            "train/grad_norm", "train/learning_rate", "perf/tokens_per_second", "perf/step_seconds", "perf/tflops",
            "data/wait_seconds", "comm/exposed_fraction", "memory/peak_bytes", "train/tokens", "train/skipped_steps",
        } <= set(line)  # fmt: skip
        assert line["perf/tokens_per_second"] > 0 and line["memory/peak_bytes"] > 50e6
        assert 0 <= line["comm/exposed_fraction"] < 1
    assert training[-1]["train/tokens"] == pytest.approx(12 * 8 * 64, rel=0.02)
    validations = [line for line in lines if "val/loss" in line]
    assert [line["step"] for line in validations] == [6, 12]
    shares = [line["val/share"] for line in validations]
    assert 0 < shares[0] < shares[1] < 1 and shares[1] == pytest.approx(3 * shares[0], rel=0.01)
    for line in validations:
        assert {"val/bits_per_byte", "val/gzip_bits_per_byte", "val/xz_bits_per_byte"} <= set(line)


def test_events_are_of_whole_steps_and_every_rank(run: tuple[Path, str]) -> None:
    events = [json.loads(line) for line in (run[0] / "events.jsonl").read_text().splitlines()]
    assert {event["rank"] for event in events} == {0, 1}
    assert {event["step"] for event in events} == {11}
    for rank in (0, 1):
        kinds = {event["kind"] for event in events if event["rank"] == rank}
        assert {"forward", "backward", "update"} < kinds


def test_trace_writes_the_timeline_of_a_run(run: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run[0])]) == 0
    timeline = json.loads((run[0] / "trace.json").read_text())
    (run[0] / "trace.json").unlink()
    assert len(timeline["traceEvents"]) > 10
    assert "trace.json" in capsys.readouterr().out


def test_the_screen_shows_the_work_the_figures_and_what_to_do_next(run: tuple[Path, str]) -> None:
    _, out = run
    assert re.search(r"text: .* 8 documents", out)
    assert re.search(r"model: nano, 0\.\d+ M parameters", out)
    assert "ranks: 2 (2 on this host), cpu in float32, 1 thread each" in out
    line = next(line for line in out.splitlines() if line.startswith("step 12/12"))
    order = ["step", "loss", "grad_norm", "lr", "memory", "tokens/s", "(global)", "TFLOP/s", "comm exposed", "ETA"]
    assert [line.index(word) for word in order] == sorted(line.index(word) for word in order)
    assert re.search(r"validation at step 6, on \d+ % of the held-out text", out)
    assert re.search(r"bits per byte on \d+ % of the held-out text \(\d documents?, [\d,]+ bytes\):\n", out)
    assert re.search(r"trained 12 steps on 2 ranks in 0:\d\d, .* validating took 0:\d\d, saving 0:\d\d\n", out)
    assert re.search(r"this model +\d\.\d+\n +gzip -9 +\d\.\d+\n +xz -9e +\d\.\d+", out)
    commands = re.findall(r"^    (paceline .*)$", out, re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["sample", "report", "trace", "train"]


def test_a_sample_shows_what_a_terminal_would_obey_and_json_keeps_it(run: tuple[Path, str]) -> None:
    arguments = ("sample", str(run[0]), "--prompt", "a\x1b[2Jb\n", "--tokens", "3", "--seed", "1")
    status, out, err = called(run[0], *arguments, "--json", "text.json")
    written = json.loads((run[0] / "text.json").read_text())
    (run[0] / "text.json").unlink()
    assert (status, err) == (0, "")
    assert out.startswith("a\\x1b[2Jb\n") and "\x1b" not in out
    assert written["text"].startswith("a\x1b[2Jb\n") and written["prompt"] == "a\x1b[2Jb\n"
    _, out, _ = called(run[0], *arguments, "--json", "-")
    assert json.loads(out) == written


def test_what_to_try_next_is_what_will_work(tmp_path: Path) -> None:
    world = SimpleNamespace(world_size=2)
    for every, suggested in ((0, False), (5, True)):
        config = TrainConfig(log=LogConfig(events_every=every))
        assert any("paceline trace" in line for line in next_steps(config, world, tmp_path)) is suggested


@pytest.mark.full
@pytest.mark.parametrize("workers", ["1", "2"])
def test_on_a_terminal_a_bar_is_drawn_between_the_lines(nano: list[str], tmp_path: Path, workers: str) -> None:
    # Long enough for several drawings, however slow the machine.
    flags = [*nano, "--steps", "100000", "--log.every", "2", "--folder", "run", "--workers", workers]
    until = r"step +\d+/100000  [█░]+  loss [^\r]* ETA"
    status, sent = on_terminal(["-m", "paceline", "train", *flags], tmp_path, stop_at=until)
    assert status == 130
    assert re.search(r"\r\x1b\[Kstep +2/100000  loss [^\r]* ETA \d+:\d+", sent)
    # The first step warms up, and what it takes is no estimate.
    assert not re.search(r"step +1/100000 [^\r]*ETA", sent)
    assert "stopped after step" in sent


def same_curve(first: Path, second: Path) -> None:
    for line, other in zip(metrics(first), metrics(second), strict=True):
        assert line["step"] == other["step"]
        for key in ("train/loss", "train/grad_norm", "val/loss", "val/bits_per_byte"):
            if key in line or key in other:
                assert line[key] == pytest.approx(other[key], rel=2e-4), (line["step"], key)


def test_the_saved_configuration_starts_the_same_run_again_also_with_one_worker(
    ranks: RankPool, run: tuple[Path, str], tmp_path: Path
) -> None:
    status, _, err = trained(ranks, 1, tmp_path, [str(run[0] / "config.yaml"), "--workers", "1"])
    assert (status, err) == (0, "")
    same_curve(run[0], tmp_path / "runs" / "latest")


def test_a_second_run_into_the_same_folder_is_refused(run: tuple[Path, str], nano: list[str], tmp_path: Path) -> None:
    before = {item: item.stat().st_mtime_ns for item in run[0].iterdir()}
    flags = ["--folder", str(run[0].resolve()), "--workers", "2"]
    status, _, err = finished(paceline("train", *nano, *flags), tmp_path)
    assert status == 2
    assert err.startswith("paceline: error: run folder") and "--folder" in err and err.count("\n") == 1
    assert before == {item: item.stat().st_mtime_ns for item in run[0].iterdir()}


@pytest.mark.full
def test_three_workers_give_the_curve_of_two(
    ranks: RankPool, run: tuple[Path, str], nano: list[str], tmp_path: Path
) -> None:
    status, _, err = trained(ranks, 3, tmp_path, [*nano, *SHORT])
    assert (status, err) == (0, "")
    same_curve(run[0], tmp_path / "runs" / "latest")


@pytest.mark.full
def test_torchrun_joins_and_gives_the_same_curve(run: tuple[Path, str], nano: list[str], tmp_path: Path) -> None:
    status, out, err = finished(torchrun(2, "-m", "paceline", "train", *nano, *SHORT), tmp_path)
    assert status == 0, err
    assert "ranks: 2 (2 on this host)" in out
    same_curve(run[0], tmp_path / "runs" / "latest")


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.full
def test_low_precision_gives_nearly_the_curve_of_float32(
    ranks: RankPool, run: tuple[Path, str], nano: list[str], tmp_path: Path, precision: str
) -> None:
    flags = ["--strategy.zero", "2", "--strategy.precision", precision]
    status, _, err = trained(ranks, 2, tmp_path, [*nano, *SHORT, *flags])
    assert (status, err) == (0, "")
    for line, other in zip(metrics(run[0]), metrics(tmp_path / "runs" / "latest"), strict=True):
        for key in ("train/loss", "val/loss"):
            if key in line:
                assert other[key] == pytest.approx(line[key], rel=5e-3), (line["step"], key)
        if "train/grad_norm" in line:
            assert other["train/grad_norm"] == pytest.approx(line["train/grad_norm"], rel=0.05)


def test_a_port_in_use_is_one_clear_message(nano: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = {
            "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]),
        }  # fmt: skip
        status, _, err = finished(paceline("train", *nano), tmp_path, job)
    assert status == 2
    assert "paceline: error: rank 0 could not join" in err and "MASTER_PORT" in err and "Traceback" not in err


@pytest.mark.parametrize(("path", "words"), [("missing.txt", "missing.txt"), full("short", "training text has")])
def test_a_mistake_in_the_data_is_one_clear_message(nano: list[str], tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "short").mkdir()
    for number in range(9):
        (tmp_path / "short" / f"{number}.txt").write_text(f"too short {number}")
    status, _, err = finished(paceline("train", *nano, "--data.path", path, "--workers", "2"), tmp_path)
    assert status == 2
    assert err.startswith("paceline: error: ") and err.count("paceline: error") == 1
    assert words in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_a_diverged_run_leaves_updates_out_and_ends_with_advice(
    ranks: RankPool, nano: list[str], tmp_path: Path
) -> None:
    status, out, err = trained(ranks, 2, tmp_path, [*nano, *LONG, "--optim.lr", "1e30", "--optim.warmup", "0"])
    assert status == 2
    left_out = re.findall(r"step (\d+): the gradient is not finite .*; (\d+) so far", out)
    assert len(left_out) == 10 and left_out[-1][1] == "10"
    assert f"10 steps in a row, the last of them step {left_out[-1][0]}" in err and "lower optim.lr" in err
    assert "Traceback" not in err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.full
def test_on_a_full_disk_training_goes_on_and_the_end_says_what_is_missing(
    ranks: RankPool, small_disk: Path, nano: list[str], tmp_path: Path
) -> None:
    flags = ["--steps", "150", "--log.every", "1", "--log.validate_every", "0", "--workers", "1"]
    status, out, err = trained(ranks, 1, tmp_path, [*nano, *flags, "--folder", str(small_disk / "run")])
    assert "step 150/150" in out
    assert status == 2
    warned = re.findall(r"WARNING: \S+/(\S+) cannot be written: .*No space left", err)
    assert sorted(warned) == ["events.jsonl", "metrics.jsonl"]
    missing = re.search(r"metrics.jsonl could not be written in full: .*\((\d+) lines are missing", out)
    last = err.rstrip().splitlines()[-1]
    assert last.startswith("paceline: error: the weights could not be saved: ") and "--folder" in last
    assert (out + err).count("model.safetensors") == 1 and "next:" not in out and "a sample" not in out
    # A line that is shorter than one which was lost may still fit.
    steps = [line["step"] for line in metrics(small_disk / "run") if "train/loss" in line]
    assert steps[0] == 1 and steps == sorted(set(steps))
    assert missing is not None and 0 < 150 - len(steps) <= int(missing[1])
    assert not (small_disk / "run" / "model.safetensors").exists()
