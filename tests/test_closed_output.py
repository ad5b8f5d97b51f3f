"""Nobody reads what a command prints: it ends quietly, or goes on where its work is not on the screen."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.quick import full
from tests.train.processes import paceline

TRAIN = ("train", "--model.preset", "nano", "--steps", "2", "--data.path", "text.txt", "--folder", "run")


def closed(command: Sequence[str], folder: Path, redirection: str) -> tuple[int, str]:
    """Exit status and stderr of a command in a shell, after what the redirection does to its output."""
    (folder / "text.txt").write_text("".join(f"line {number}\n" for number in range(3000)))
    script = f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *command],
        cwd=folder,
        env={**os.environ, "PACELINE_CACHE": str(folder / "cache")},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [("help",), full(("train", "--help")), full(("version",))])
def test_a_closed_stdout_is_no_mistake(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert closed(paceline(*arguments), tmp_path, ">&-") == (0, "")


@pytest.mark.parametrize("workers", ["2", full("1")])
def test_a_training_whose_output_nobody_reads_ends_quietly(tmp_path: Path, workers: str) -> None:
    status, told = closed(paceline(*TRAIN, "--workers", workers), tmp_path, "| true")
    assert status == 141
    assert [line for line in told.splitlines() if not line.startswith(("warning", "note"))] == []


@pytest.mark.full
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_training_with_closed_streams_goes_on(tmp_path: Path, workers: str) -> None:
    assert closed(paceline(*TRAIN, "--workers", workers), tmp_path, ">&- 2>&- <&-")[0] == 0
    assert (tmp_path / "run" / "model.safetensors").exists()
