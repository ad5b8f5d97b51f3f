from __future__ import annotations

import json
from pathlib import Path

from paceline.bench import cli
from paceline.bench.overhead import STRATEGIES


def test_what_a_unit_costs_is_measured_at_every_stage(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    assert cli.main(["overhead", "--units", "4", "--rounds", "2", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert set(figures) == {f"{name}, {ranks}" for name in STRATEGIES for ranks in ("1 rank", "2 ranks")}
    assert figures["zero 3, 2 ranks"] > figures["zero 0, 1 rank"]
