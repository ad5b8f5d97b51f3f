"""Saving and loading beside PyTorch's distributed checkpoints, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.cli import main
from paceline.core.errors import UserError


@pytest.mark.full
def test_both_save_and_load_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "checkpoint.json", tmp_path / "checkpoints"
    flags = ["--mb", "50", "--rounds", "1", "--json", str(file), "--folder", str(folder)]
    assert main(["checkpoint", *flags]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 and len(capsys.readouterr().out.splitlines()) == 3
    for row in rows:
        assert 40e6 < row["bytes"] < 60e6
        assert min(row["stall_ms"], row["load_seconds"], row["of_page_cache"]) > 0
    assert list(folder.iterdir()) == []


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UserError, match="expected ranks, mb and rounds of 1 or more"):
        main(["checkpoint", "--rounds", "0"])
