"""Jobs of workers without torch: they start in a tenth of a second."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from tests.train.processes import Program, program

WORKER = """
import os, signal, sys, time
from pathlib import Path
from paceline.core.errors import UserError
from paceline.launch.stop import StopRequest
from paceline.launch.worker import FORKS, run_worker
if FORKS in os.environ:
    from paceline.launch.forking import become_worker
    become_worker()
rank = int(os.environ["RANK"])

def note(name):
    Path(f"{name}-{rank}").touch()

def work():
    note("began")
%s
    return 0

sys.exit(run_worker(work))
"""
LAUNCHER = """
import sys
from paceline.launch.process import Command
from paceline.launch.workers import launch
sys.exit(launch(Command([sys.executable, "worker.py"], tuple(sys.argv[2:])), int(sys.argv[1])))
"""


def job(  # type: ignore[no-untyped-def]
    folder: Path,
    body: str,
    workers: int = 2,
    environment: dict[str, str] | None = None,
    imports: Sequence[str] = (),
):
    """A program that launches workers of this body, forked from a process that has imported `imports`, if any."""
    (folder / "worker.py").write_text(WORKER % textwrap.indent(textwrap.dedent(body), "    "))
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / "tmp").mkdir(exist_ok=True)
    # The launched scripts do not lie in the repository.
    root = str(Path(__file__).parents[2])
    return program(
        [sys.executable, "launcher.py", str(workers), *imports],
        folder,
        {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": root, **(environment or {})},
    )


def wait_for(started: Program, *paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert started.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def nothing_is_left(folder: Path, started: Program) -> None:
    assert not list((folder / "tmp").iterdir())
    assert not started.alive()
