"""Every example runs as it stands, in one process and as ranks, and all find the same weights."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.train.processes import torchrun

EXAMPLES = Path(__file__).parent.parent / "examples"
TRAINING = ("manual_loop.py", "three_lines.py", "accumulation.py")


def printed(name: str) -> str:
    """What this rank prints when it runs an example."""
    sys.path.insert(0, str(EXAMPLES))
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.path.remove(str(EXAMPLES))
    return out.getvalue()


def loss_in(text: str) -> float:
    (loss,) = re.findall(r"loss ([0-9.]+)", text)
    return float(loss)


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> float:
    return loss_in(ranks(1, printed, "three_lines.py")[0])


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINING)
def test_two_ranks_find_what_one_process_finds(ranks: RankPool, name: str, one_process: float) -> None:
    assert loss_in(ranks(2, printed, name)[0]) == pytest.approx(one_process, abs=1e-8)


@pytest.mark.full
def test_torchrun_starts_them(one_process: float) -> None:
    # One stands for all, as they ask nothing else of who starts them; three_lines.py is in test_your_own_loop.py.
    command = torchrun(2, str(EXAMPLES / "manual_loop.py"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert loss_in(done.stdout) == pytest.approx(one_process, abs=1e-8)


@pytest.mark.parametrize(("n", "total", "sent"), [(1, 1, 0), (2, 3, 4_000_000)])
def test_collectives_tell_what_they_sent_and_why(ranks: RankPool, n: int, total: int, sent: int) -> None:
    text = ranks(n, printed, "collectives.py")[0]
    assert f"{n} ranks, sum {total}, {sent} bytes sent\nall_reduce of 4,000,000 bytes" in text
    assert text.count("<- chosen") == 1


def test_the_manual_loop_is_thirty_lines() -> None:
    text = (EXAMPLES / "manual_loop.py").read_text().split('"""', 2)[2]
    assert len([line for line in text.splitlines() if line.strip()]) <= 30


def test_the_example_learns(one_process: float) -> None:
    assert one_process < 0.1
