from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench import plan
from paceline.bench.plan import PlanBench, PlanRow, between, summary
from paceline.core.errors import UserError
from paceline.plan.hardware import Device, Hardware, Kernels, Link, Rates

HERE = Hardware(
    Device("this", 10**10, 1e10, {"float32": 1e11, "bfloat16": 1e11}, {"float32": 1e11, "bfloat16": 1e11}),
    Kernels(1e-6, 1.0, 1.0, 0.0, 0.5, contention=0.2),
    2,
    Link(1e-5, 1e9),
    Link(1e-5, 1e9),
    measured={"gelu float32": Rates(1e-6, 0.0, 1e-10)},
)


def row(zero: int, measured: float, predicted: float, size: str = "small") -> PlanRow:
    return PlanRow(size, 2, zero, "float32", "none", measured, 0.1, predicted, 100, 102)


def test_the_summary_has_the_errors_and_what_the_planners_choice_loses() -> None:
    found = summary([row(0, 10.0, 11.0), row(1, 20.0, 10.5), row(0, 8.0, 8.0, "large"), row(3, 9.0, 9.9, "large")])
    assert found["time_error_mean"] == pytest.approx((0.1 + 0.475 + 0.0 + 0.1) / 4)
    assert found["memory_error_most"] == pytest.approx(0.02)
    # Of the small model it would take zero 1, which takes twice as long; of the large one the fastest.
    assert (found["choices"], found["choices_within_3_percent"]) == (2, 1)
    assert found["choice_lost_most"] == pytest.approx(1.0)


def test_a_machine_measured_twice_is_taken_in_the_middle() -> None:
    later = Hardware(
        **{
            **{name: getattr(HERE, name) for name in ("device", "devices_per_host", "within", "between")},
            "kernels": Kernels(3e-6, 1.0, 1.0, 0.0, 0.5, contention=0.4),
            "measured": {"gelu float32": Rates(3e-6, 0.0, 3e-10)},
        }
    )
    middle = between(HERE, later)
    assert middle.measured["gelu float32"] == Rates(2e-6, 0.0, 2e-10)
    assert (middle.kernels.launch, middle.kernels.contention) == (pytest.approx(2e-6), pytest.approx(0.3))


def test_a_size_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="--sizes: expected some of small, middle, large, got 'huge'"):
        plan.main(PlanBench(sizes=("huge",)))


@pytest.mark.full
def test_settings_are_run_and_forecast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for calibration, which tests of its own hold to what it should find."""
    monkeypatch.setattr(plan, "measured_here", lambda ranks, seconds: HERE)
    path = tmp_path / "plan.json"
    plan.main(
        PlanBench(ranks=(2,), sizes=("small",), precision=("float32",), zero=(0, 3), rounds=1, steps=1, json=str(path))
    )
    written = json.loads(path.read_text())
    assert [(each["zero"], each["recompute"]) for each in written["rows"]] == [
        (0, "none"), (0, "unit"), (3, "none"), (3, "unit")
    ]  # fmt: skip
    assert all(each["measured_ms"] > 0 and each["measured_bytes"] > 2**20 for each in written["rows"])
    assert "step time: mean error" in capsys.readouterr().out
