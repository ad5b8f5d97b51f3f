from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.report.forecast import Pair, read_forecast


def written(folder: Path, **changed: object) -> Path:
    plan = {
        "ranks": 2,
        "step_seconds": {"predicted": 0.09, "measured": 0.1},
        "peak_bytes": {"predicted": 3 * 2**20, "measured": 2 * 2**20},
    }
    path = folder / "plan.json"
    path.write_text(json.dumps(plan | changed))
    return path


def test_predicted_stands_beside_measured_with_its_error(tmp_path: Path) -> None:
    problems: list[str] = []
    found = read_forecast(written(tmp_path), problems)
    assert found is not None and not problems
    assert [text for _, _, text, _ in found.figures()] == [
        "90.0 ms, measured 100 ms (-10.0 %)",
        "3.00 MiB, measured 2.00 MiB (+50.0 %)",
    ]


def test_a_step_that_nobody_forecast_is_not_among_the_figures(tmp_path: Path) -> None:
    found = read_forecast(written(tmp_path, step_seconds={"predicted": None, "measured": 0.1}), [])
    assert found is not None
    assert [name for name, *_ in found.figures()] == ["forecast_peak_bytes"]


def test_a_run_that_has_not_ended_has_none_and_says_nothing(tmp_path: Path) -> None:
    problems: list[str] = []
    assert read_forecast(tmp_path / "plan.json", problems) is None and not problems


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"step_seconds": 3}', "[" * 100_000])
def test_a_damaged_file_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    problems: list[str] = []
    assert read_forecast(path, problems) is None
    assert len(problems) == 1 and problems[0].startswith("plan.json cannot be read")


@pytest.mark.parametrize(("predicted", "measured"), [(1.0, 0.0), (None, 1.0), (1.0, -1.0)])
def test_no_error_is_told_of_what_is_no_measurement(predicted: float | None, measured: float) -> None:
    assert Pair(measured, predicted).error is None
