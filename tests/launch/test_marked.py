"""The processes of a training are found, in the order in which they were started, whatever their numbers are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.launch.marked import marked

NAME = "PACELINE_TEST_MARK"


def test_processes_are_in_the_order_of_their_start(tmp_path: Path) -> None:
    mark = str(tmp_path)
    started = []
    try:
        for _ in range(3):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", "input()"],
                    env={**os.environ, NAME: mark},
                    stdin=subprocess.PIPE,
                )
            )
            time.sleep(0.05)  # the kernel's clock of starts ticks each 10 ms
        found = marked(NAME, mark)
        assert list(found) == [process.pid for process in started]
        assert all(items[NAME] == mark for items in found.values()) and marked(NAME, "another") == {}
    finally:
        for process in started:
            process.kill()
    # Not yet waited for: what has ended is none.
    deadline = time.monotonic() + 30
    while marked(NAME, mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert marked(NAME, mark) == {}
    for process in started:
        process.wait()


def test_numbers_that_begin_anew_do_not_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, started in ((32760, 500), (32767, 510), (301, 520)):
        folder = tmp_path / "proc" / str(number)
        folder.mkdir(parents=True)
        (folder / "environ").write_bytes(f"{NAME}=here\0".encode())
        (folder / "comm").write_text("seat\n")
        (folder / "stat").write_text(f"{number} (a ) b) S " + " ".join(["0"] * 18) + f" {started} 0 0\n")
    monkeypatch.setattr("paceline.launch.marked.PROCESSES", tmp_path / "proc")
    monkeypatch.setattr("paceline.launch.worker.PROCESSES", tmp_path / "proc")
    assert list(marked(NAME, "here")) == [32760, 32767, 301]
