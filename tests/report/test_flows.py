"""Arrows of a trace: both ends lie in the ops that they are about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.cli import main
from paceline.report.meetings import groups_of
from paceline.report.trace import chrome_trace
from tests.report.test_trace import STEP, event


def arrows(trace: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, source and target of each, found by where its ends lie; both lie in one op each."""
    slices = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    found: dict[int, list[tuple[float, str]]] = {}
    names = {}
    for entry in trace["traceEvents"]:
        if entry["ph"] in "sf":
            (bound,) = [
                one
                for one in slices
                if (one["pid"], one["tid"]) == (entry["pid"], entry["tid"])
                and one["ts"] <= entry["ts"] < one["ts"] + one["dur"]
            ]
            found.setdefault(entry["id"], []).append((entry["ts"], f"{bound['name']} of {bound['pid']}"))
            names[entry["id"]] = entry["name"]
            assert entry["ph"] == "s" or entry["bp"] == "e"
    assert all(len(ends) == 2 and ends[0][0] <= ends[1][0] for ends in found.values())
    return [(names[number], ends[0][1], ends[1][1]) for number, ends in found.items()]


def test_arrows_lead_from_ops_to_those_that_waited() -> None:
    update = [event("update", "optimizer", "compute", rank, 11.4, 11.5 + rank) for rank in (0, 1)]
    assert arrows(chrome_trace([*STEP, *update], groups_of(None, 2))) == [
        ("came last", "all_reduce bucket 0 of 1", "all_reduce bucket 0 of 0"),
        ("stood still for", "all_reduce bucket 0 of 0", "update optimizer of 0"),
        ("stood still for", "all_reduce bucket 0 of 1", "update optimizer of 1"),
    ]
    # What nobody stood still for, and who met nobody, has no arrow.
    hidden = [event("all_gather", "0", "gather", rank, 10.0 + rank, 10.9 + rank) for rank in (0, 1)]
    assert arrows(chrome_trace([*STEP[:2], *STEP[3:5], *hidden], lambda each: (each.rank,))) == []


def test_a_training_has_arrows_that_end_in_ops(run: Path, tmp_path: Path) -> None:
    assert main(["trace", str(run), "--out", str(tmp_path / "flows.json")]) == 0
    drawn = arrows(json.loads((tmp_path / "flows.json").read_text()))
    assert {name for name, _, _ in drawn} == {"came last", "stood still for"}
