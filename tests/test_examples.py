"""Every example runs as it stands, alone and under torchrun, and all find the same weights."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"loss ([0-9.]+)", done.stdout)
    return float(loss)


@pytest.fixture(scope="module")
def alone() -> float:
    return run([sys.executable, str(EXAMPLES / "three_lines.py")])


@pytest.mark.parametrize("name", ["manual_loop.py", "three_lines.py", "accumulation.py"])
def test_two_ranks_find_what_one_process_finds(name: str, alone: float) -> None:
    assert run([*TORCHRUN, str(EXAMPLES / name)]) == pytest.approx(alone, abs=1e-8)


def test_the_manual_loop_is_thirty_lines() -> None:
    text = (EXAMPLES / "manual_loop.py").read_text().split('"""', 2)[2]
    assert len([line for line in text.splitlines() if line.strip()]) <= 30


def test_the_example_learns(alone: float) -> None:
    assert alone < 0.1
