from __future__ import annotations

import json

import pytest

from paceline.bench import cli
from paceline.bench.overhead import STRATEGIES


@pytest.mark.full
def test_what_a_unit_costs_is_measured_at_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["overhead", "--units", "4", "--rounds", "2", "--json", "-"]) == 0
    told = capsys.readouterr()
    assert "zero 3" in told.err
    # Nothing but the JSON is on stdout.
    figures = json.loads(told.out)["figures"]
    assert set(figures) == {f"{name}, {ranks}" for name in STRATEGIES for ranks in ("1 rank", "2 ranks")}
    assert figures["zero 3, 2 ranks"] > figures["zero 0, 1 rank"]
