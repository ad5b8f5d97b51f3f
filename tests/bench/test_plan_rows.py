from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from paceline.bench.plan import SIZES
from paceline.bench.plan_rows import PlanRow, lost_by_choice, predicted, read, summary, table, told
from paceline.core.errors import UserError
from paceline.measuring.results import write_json
from tests.bench.test_plan import HERE

CASES = {case.name: case for case in SIZES}


def row(zero: int, measured: float, forecast: float, size: str = "small") -> PlanRow:
    return PlanRow(size, 2, zero, "float32", "none", (measured, measured), measured, 0.1, 100, 400, forecast, 102, 380)  # type: ignore[arg-type]


ROWS = [row(0, 10.0, 11.0), row(1, 20.0, 10.5), row(0, 8.0, 8.0, "large"), row(3, 9.0, 9.9, "large")]


def test_the_summary_has_the_errors_and_what_the_planners_choice_loses() -> None:
    found = summary(ROWS)
    assert found["time_error_mean"] == pytest.approx((0.1 + 0.475 + 0.0 + 0.1) / 4)
    assert (found["memory_error_most"], found["process_error_mean"]) == (pytest.approx(0.02), pytest.approx(0.05))
    # Of the small model it would take zero 1, which takes twice as long; of the large one the fastest.
    assert (found["choices"], found["choices_within_3_percent"]) == (2, 1)
    assert found["choice_lost_most"] == pytest.approx(1.0)
    assert "in 1 of 2" in told(ROWS)[-1] and "-47.5%" in table(ROWS)


def test_a_choice_is_compared_with_the_fastest_round_by_round() -> None:
    chosen, fastest = row(0, 10.0, 1.0), row(1, 9.5, 2.0)
    # Others slowed the second round of both.
    rounds = [replace(chosen, rounds_ms=(10.0, 30.0, 10.1)), replace(fastest, rounds_ms=(9.8, 29.4, 9.5))]
    assert lost_by_choice(rounds) == pytest.approx(10.0 / 9.8 - 1)
    assert lost_by_choice(rounds[:1]) == 0.0


def test_of_forecasts_alike_the_choice_is_the_planners() -> None:
    rows = [row(1, 10.5, 10.0), row(0, 10.0, 10.04)]
    assert lost_by_choice(rows) == 0.0
    assert lost_by_choice([rows[0], replace(rows[1], predicted_ms=10.06)]) == pytest.approx(0.05)


def test_what_was_measured_is_predicted_again_on_the_machine_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(str(path), ROWS, {"hardware": {2: asdict(HERE)}})
    rows, hardware = read(path)
    assert (rows, hardware) == (ROWS, {2: HERE})
    once = predicted(rows, hardware, CASES)
    assert [(each.measured_ms, each.allocated_bytes) for each in once] == [(each.measured_ms, 100) for each in ROWS]
    assert all(each.predicted_ms > 0 and each.predicted_bytes > 2**20 for each in once)
    slower = replace(HERE, hooks=HERE.hooks + 1e-3)
    assert all(b.predicted_ms > a.predicted_ms for a, b in zip(once, predicted(rows, {2: slower}, CASES), strict=True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[]", "list indices"),
        ("{}", "'rows' is missing"),
        (json.dumps({"rows": [], "hardware": {"2": {}}}), "missing required field"),
        (json.dumps({"rows": [{"size": "small"}], "hardware": {}}), "missing required field"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UserError, match=f"expected what `paceline bench plan --json` writes: .*{said}"):
        read(path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read(tmp_path / "none.json")
