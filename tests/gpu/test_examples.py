"""The README's loop and the examples run on a GPU as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.devices import SECONDS, on_a_gpu

pytestmark = on_a_gpu

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", code],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0", **env},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.parametrize("name", ["three_lines.py", "manual_loop.py", "accumulation.py"])
def test_examples(name: str) -> None:
    ran = run((ROOT / "examples" / name).read_text(), PYTHONPATH="examples")
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"1 ranks, loss 0\.0", ran.stdout), ran.stdout


def test_the_readmes_loop() -> None:
    blocks = PYTHON.findall((ROOT / "README.md").read_text())
    assert blocks
    ran = run(blocks[0])
    assert ran.returncode == 0, ran.stderr
