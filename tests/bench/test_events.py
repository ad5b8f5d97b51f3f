from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench import cli


@pytest.mark.full
def test_the_cost_of_events_is_measured_against_a_step(tmp_path: Path) -> None:
    file = tmp_path / "events.json"
    assert cli.main(["events", "--preset", "nano", "--batch", "1", "--rounds", "4", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert figures["ops_per_step"] > 5
    assert 0 < figures["seconds_per_op"] < 1e-3
    assert figures["share_of_step"] > 0 and 0.1 < figures["on_to_off"] < 10
    assert figures["rounds"] == 4 and 0 < figures["on_to_off_error"] < 10
