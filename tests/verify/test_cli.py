"""The command as users type it."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from paceline.cli import main
from tests.quick import full
from tests.train.processes import called, paceline, program

DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "verify.md"
WRONG = """
import os, torch
from torch import nn
from right import batches, loss

class Biased(nn.Linear):
    def forward(self, x):
        return super().forward(x) + int(os.environ.get("RANK", 0))

def build():
    return nn.Sequential(nn.Linear(32, 32), Biased(32, 32))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (example,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENTED.read_text(), re.M | re.S)
    (tmp_path / "right.py").write_text(example)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "temporary").mkdir()
    return tmp_path


def verify(folder: Path, *arguments: str) -> tuple[int, str, str]:
    with patch.object(tempfile, "tempdir", str(folder / "temporary")):
        result = called(folder, "verify", *arguments)
    assert list((folder / "temporary").glob("paceline-*")) == []
    return result


@pytest.mark.full
def test_a_right_model_gives_a_table_and_status_0(folder: Path) -> None:
    arguments = ("right:build", "--data", "right:batches", "--loss", "right:loss", "--json", "found.json")
    status, out, err = verify(folder, *arguments)
    assert (status, err) == (0, "")
    found = json.loads((folder / "found.json").read_text())["comparisons"]
    assert [entry["stage"] for entry in found] == [f"zero {stage}" for stage in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert all(entry["equal"] and 0 <= entry["differences"]["gradient"] < 1e-9 for entry in found)
    lines = out.splitlines()
    assert [line[:6] for line in lines[1:9]] == [f"zero {stage}" for stage in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert all(line.endswith("equal") for line in lines[1:9])
    assert lines[-1].startswith("all equal to one process: float64")


@pytest.mark.full
def test_hybrid_sharding_is_compared_where_ranks_form_groups(folder: Path) -> None:
    arguments = ("right:build", "--data", "right:batches", "--loss", "right:loss", "--steps", "1")
    status, out, _ = verify(folder, *arguments, "--workers", "4", "--micro-batches", "2")
    assert status == 0
    assert "hybrid: zero 3 in groups of 2" in out and out.count(" equal\n") == 5


@pytest.mark.full
def test_a_wrong_model_is_told_once_for_all_stages_and_gives_status_1(folder: Path) -> None:
    status, out, err = verify(folder, "wrong:build", "--data", "right:batches", "--loss", "right:loss", "--steps", "1")
    assert (status, err) == (1, "")
    assert out.count(" differs\n") == 8
    told = " ".join(out.split())
    assert told.count("The first op that can explain it: forward of 1") == 1
    assert "step 0, micro-batch 0, rank 1: what unit 1 gives differs" in told
    assert "8 of 8 comparisons are not equal" in told


@pytest.mark.full
def test_what_cannot_be_equal_is_said_before_anything_runs(folder: Path) -> None:
    (folder / "drops.py").write_text(
        "from torch import nn\ndef build(): return nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5))\n"
    )
    arguments = ("drops:build", "--data", "right:batches", "--loss", "right:loss", "--steps", "1")
    status, out, _ = verify(folder, *arguments)
    assert status == 1 and out.startswith("cannot be equal: 1 drop at random") and "zero" not in out
    status, out, _ = verify(folder, *arguments, "--eval", "--micro-batches", "1")
    assert status == 0 and out.count(" equal\n") == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected module:function that builds a model"),
        (["x:build", "--matrix"], "leave build, --data and --loss out"),
        (["x:build", "--markdown", "a.md"], "--markdown goes with --matrix"),
        (["x:build", "--workers", "0"], "at least 1"),
        (["x:build", "--micro-batches", "0"], "numbers from 1 on"),
    ],
)
def test_options_that_make_no_sense_are_a_users_mistake(arguments, words, capsys) -> None:
    assert main(["verify", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and words in told.err and told.err.startswith("paceline: error: ")


@pytest.mark.full
def test_a_model_that_is_not_there_is_a_users_mistake(folder: Path) -> None:
    status, out, err = verify(folder, "right:bild", "--data", "right:batches")
    assert (status, out) == (2, "")
    assert err == "paceline: error: build: right has no 'bild'; did you mean build?\n"


def test_help_explains(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", "--help"])
    assert caught.value.code == 0
    assert "paceline verify my_module:build --data my_module:batches" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), full(signal.SIGTERM, 128 + signal.SIGTERM)])
def test_interrupted_it_leaves_neither_processes_nor_files(folder: Path, number: signal.Signals, expected: int) -> None:
    (folder / "slow.py").write_text("import time\nfrom right import *\ndef loss(*_): time.sleep(600)\n")
    arguments = ("slow:build", "--data", "slow:batches", "--loss", "slow:loss")
    with program(paceline("verify", *arguments), folder, {"TMPDIR": str(folder / "temporary")}) as started:
        deadline = time.monotonic() + 60
        # A rank writes it when it is ready to work.
        while not any((folder / "temporary").glob("paceline-ranks-*/stacks-0")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if number == signal.SIGINT:
            os.killpg(started.process.pid, number)
        else:
            started.process.send_signal(number)
        status, _, err = started.finish()
        started.wait_until_gone(20)
    assert status == expected and "Traceback" not in err
    assert list((folder / "temporary").glob("paceline-*")) == []
