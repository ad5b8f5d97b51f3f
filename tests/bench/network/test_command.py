"""What the command says before it makes hosts; so these tests run everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from paceline.bench import cli
from paceline.bench.network.command import Experiment
from paceline.bench.network.rank import EXPERIMENTS
from paceline.core.errors import UserError


def test_missing_programs_are_named_with_their_packages_and_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["network", "--json", str(tmp_path / "rows.json")]) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "skipped, nothing was measured" in shown.err
    assert "the programs ip, tc of the package iproute2 on the PATH" in shown.err
    assert "the programs unshare, nsenter, mount of the package util-linux on the PATH" in shown.err
    assert not (tmp_path / "rows.json").exists()


def test_root_is_asked_for() -> None:
    # As a user without rights, whoever runs this.
    script = """
import os
from paceline.bench.network.hosts import missing
if os.geteuid() == 0:
    os.setuid(65534)
print(missing())
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.startswith("root")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "1"], "--hosts: expected 2 to 250, got 1"),
        (["--ranks-per-host", "0"], "--ranks-per-host: expected 1 to 64, got 0"),
        (["--gbit", "0"], "--gbit: expected 0.01 to 1000, got 0.0"),
        (["--rounds", "1"], "--rounds: expected 2 to"),
        (["--json", "nowhere/rows.json"], "nowhere/rows.json: there is no folder nowhere"),
        (["--plot", "steps.pdf"], "ends with .png or .svg, got steps.pdf"),
        (["--plot", "a.png", "--experiments", "all-reduce"], "add one of them to --experiments"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        cli.main(["network", *arguments])
    assert words in str(caught.value)


def test_every_experiment_can_be_asked_for() -> None:
    assert set(get_args(Experiment)) == set(EXPERIMENTS)
