from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.train.metrics import Interval, duration, open_trackers
from paceline.train.run_folder import RunFolder
from paceline.train.sections import LogConfig
from tests.train.processes import called

INTERVAL = Interval(
    step=50,
    steps=1800,
    loss=4.25,
    grad_norm=0.5,
    learning_rate=6e-3,
    tokens_per_second=16500.0,
    step_seconds=0.06,
    flops=2e12,
    peak_flops=None,
    wait_seconds=0.001,
    exposed_fraction=0.034,
    crowded_fraction=0.01,
    peak_bytes=3 << 29,
    tokens=51200,
    skipped=0,
)


def test_a_line_has_the_figures_in_order_with_units() -> None:
    line = INTERVAL.line()
    assert line == (
        "step   50/1800  loss  4.2500  grad_norm  0.500  lr 6.00e-03  memory 1.50 GiB  tokens/s 16,500 (global)  "
        "TFLOP/s 2  comm exposed 3.4 %  ETA 1:45"
    )


def test_mfu_is_shown_where_a_peak_is_known() -> None:
    values = {name: getattr(INTERVAL, name) for name in INTERVAL.__dataclass_fields__}
    known = Interval(**{**values, "peak_flops": 8e12})
    assert "TFLOP/s 2  MFU 25.0 %  comm" in known.line()
    assert known.figures()["perf/mfu"] == 0.25
    assert "perf/mfu" not in INTERVAL.figures()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (95, "1:35"), (7384, "2:03:04")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_figure_that_is_no_number_is_null_in_the_file(tmp_path: Path) -> None:
    (tracker,) = open_trackers(LogConfig(), RunFolder(tmp_path), {})
    tracker.log({"train/loss": float("nan"), "train/tokens": 3}, 7)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["step"], line["train/loss"], line["train/tokens"]) == (7, None, 3)


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the tensorboard extra"
    )
    trackers = open_trackers(LogConfig(tensorboard=True), RunFolder(tmp_path), {})
    for tracker in trackers:
        tracker.log(dict(INTERVAL.figures()), 50)
        tracker.finish()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(INTERVAL.figures())
    (point,) = events.Scalars("train/loss")
    assert (point.step, point.value) == (50, 4.25)


def test_wandb_gets_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda figures, step: calls.append((figures, step)), finish=lambda: calls.append("finished")
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: calls.append(settings) or run))
    trackers = open_trackers(LogConfig(wandb=True), RunFolder(tmp_path), {"steps": 3})
    for tracker in trackers:
        tracker.log({"train/loss": 1.0}, 5)
        tracker.finish()
    assert calls[0]["config"] == {"steps": 3} and calls[0]["name"] == tmp_path.name
    assert calls[1:] == [({"train/loss": 1.0}, 5), "finished"]


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_any_work(
    nano: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    status, out, err = called(tmp_path, "train", *nano, f"--log.{tracker}")
    assert (status, out) == (2, "")
    assert f"pip install 'paceline[{tracker}]'" in err
    assert list(tmp_path.iterdir()) == []
