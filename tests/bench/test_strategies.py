from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench import cli, strategies
from paceline.bench.ranks import run_ranks
from paceline.models.presets import preset
from paceline.strategy import SYSTEMS


def test_every_system_runs_beside_ddp_and_sends_what_its_schedule_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "CASES", (strategies.Case("nano", preset("nano"), 1),))
    file = tmp_path / "rows.json"
    assert cli.main(["strategies", "--cases", "nano", "--rounds", "2", "--steps", "1", "--json", str(file)]) == 0
    rows = {(row["system"], row["setting"]): row for row in json.loads(file.read_text())["rows"]}
    assert {setting for system, setting in rows if system == "paceline"} == set(SYSTEMS)
    assert sum(system == "torch DDP" for system, _ in rows) == 3
    assert all(row["median_ms"] > 0 and row["peak_bytes"] > 0 for row in rows.values())
    assert min(row["ratio"] for (system, _), row in rows.items() if system == "torch DDP") <= 1.01
    gradients = rows["torch DDP", "default"]["wire_bytes"]
    ours = rows["paceline", "buckets, overlapped"]["wire_bytes"]
    assert gradients <= ours < 1.02 * gradients, "the same bytes, but for padding and the counts"


def fail(rank_that_fails: int) -> None:
    import paceline as pl

    if pl.init().rank == rank_that_fails:
        raise ValueError("on purpose")
    pl.barrier()


def test_a_rank_that_fails_is_named_and_no_process_stays() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 failed(.|\n)*on purpose"):
        run_ranks(2, fail, 0)
