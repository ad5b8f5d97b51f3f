from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.measuring.results import half_spread, make_row, print_rows, write_json


def test_the_ratio_is_the_median_over_rounds_not_the_ratio_of_medians() -> None:
    row = make_row("case", "ours", "default", 2, [1.0, 4.0, 9.0], [1.0, 2.0, 3.0], 5, 7)
    assert (row.median_ms, row.ratio) == (4000.0, 2.0)


def test_spread_is_half_the_distance_between_quartiles() -> None:
    assert half_spread([1, 2, 3, 4, 5]) == pytest.approx(1.0)
    assert half_spread([3]) == 0


def test_the_file_names_machine_versions_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = make_row("case", "ours", "default", 2, [1.0, 2.0], [1.0, 2.0], 2**20, 10**6)
    write_json(str(tmp_path / "out.json"), [row])
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["machine"]["torch"]
    assert kept["machine"]["cores"] > 0
    assert kept["command"].startswith("paceline")
    columns = {"case", "system", "setting", "ranks", "median_ms", "spread_ms", "ratio", "peak_bytes", "wire_bytes"}
    assert columns <= kept["rows"][0].keys()
    print_rows([row], "theirs")
    assert "ours: default" in capsys.readouterr().out


def test_groups_and_precisions_are_printed_apart_with_memory_beyond_the_libraries(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = make_row("case", "ours", "default", 2, [1.0, 2.0], [1.0, 2.0], 700 * 2**20, 10**6)
    print_rows([row, replace(row, group="stage 3", precision="bfloat16", base_bytes=300 * 2**20)], "theirs")
    plain, grouped = capsys.readouterr().out.strip().split("\n\n")
    assert plain.startswith("case, 2 ranks; ratio to theirs")
    assert grouped.startswith("case, 2 ranks, stage 3, bfloat16; ratio to theirs")
    assert plain.splitlines()[-1].split()[-2:] == ["700", "1.00"]
    assert grouped.splitlines()[-1].split()[-3:] == ["700", "400", "1.00"]
