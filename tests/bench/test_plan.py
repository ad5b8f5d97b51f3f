from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench import plan
from paceline.bench.plan import PlanBench, between
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
    monkeypatch.setattr(plan, "measured_here", lambda ranks, seconds: (HERE, 0.0))
    path = tmp_path / "plan.json"
    plan.main(
        PlanBench(ranks=(2,), sizes=("small",), precision=("float32",), zero=(3,), rounds=1, steps=1, json=str(path))
    )
    written = json.loads(path.read_text())
    assert [(each["zero"], each["recompute"]) for each in written["rows"]] == [
        (3, "none"), (3, "unit")
    ]  # fmt: skip
    for each in written["rows"]:
        assert each["measured_ms"] > 0
        # What is allocated does not hang on the C library nor on the machine. Ranks share some pages to meet in.
        assert each["predicted_bytes"] == pytest.approx(each["allocated_bytes"], abs=2**19)
        assert each["process_bytes"] > each["allocated_bytes"]
    first = capsys.readouterr().out
    assert "step time: mean error" in first
    assert plan.main(PlanBench(again=str(path))) == 0
    assert capsys.readouterr().out == first
