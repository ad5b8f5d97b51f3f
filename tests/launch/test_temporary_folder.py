from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paceline.launch.temporary_folder import TemporaryFolder

KILLED = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from paceline.launch.temporary_folder import TemporaryFolder
folder = TemporaryFolder("bench")
(folder.path / "log").write_text("much")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, timeout=60).stdout
    left = Path(told.strip())
    assert (left / "log").exists()
    with TemporaryFolder("ranks") as one, TemporaryFolder("verify") as other:
        assert not left.exists()
        assert one.path.is_dir() and other.path.is_dir()
        assert one.path.stat().st_mode & 0o77 == 0
    assert not list(tmp_path.iterdir())
