"""Saving and loading beside PyTorch's distributed checkpoints, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench import checkpoint
from paceline.bench.checkpoint_systems import THREADS
from paceline.bench.cli import main
from paceline.core.errors import UserError


@pytest.mark.full
def test_all_save_and_load_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other numbers of threads take as long again each, mostly to start processes.
    monkeypatch.setattr(checkpoint, "THREADS", THREADS[:1])
    file, folder = tmp_path / "checkpoint.json", tmp_path / "checkpoints"
    flags = ["--mb", "50", "--rounds", "1", "--json", str(file), "--folder", str(folder)]
    assert main(["checkpoint", *flags]) == 0
    rows = json.loads(file.read_text())["rows"]
    kinds = ["in the background"] * (1 + 2) + ["at once"] * (1 + 1)
    assert [row["kind"] for row in rows] == kinds and len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    first = {row["kind"]: row for row in reversed(rows)}
    assert all(row["system"].startswith("paceline") for row in first.values())
    for row in rows:
        ours = first[row["kind"]]
        assert row["stall_ratio"] == ours["stall_ms"] / row["stall_ms"]
        assert row["load_ratio"] == ours["load_seconds"] / row["load_seconds"]
        assert 40e6 < row["bytes"] < 60e6
        assert min(row["stall_ms"], row["load_seconds"], row["of_page_cache"]) > 0
    assert list(folder.iterdir()) == []


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UserError, match="expected ranks, mb and rounds of 1 or more"):
        main(["checkpoint", "--rounds", "0"])
