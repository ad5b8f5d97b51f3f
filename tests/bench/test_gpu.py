"""What `paceline bench gpu` does on any device, on the CPU with a small model."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from paceline.bench import gpu
from paceline.cli import main
from paceline.models.flops import flops_per_token
from paceline.models.presets import preset
from tests.quick import full


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with patch("torch.cuda.is_available", lambda: False):
        assert main(["bench", "gpu"]) == 2
    assert "bench gpu: torch sees no GPU" in capsys.readouterr().err


NAMES = [system.label for system in gpu.systems()]


# Each system has a process of its own.
@pytest.mark.full
@pytest.mark.parametrize(
    "left_out", [("compiled", "zero 0", "zero 1", "zero 2"), full(("compiled",))], ids=["few", "all"]
)
def test_every_system_but_the_compiled_one_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left_out: tuple[str, ...]
) -> None:
    assert NAMES[:2] == ["PyTorch: plain, autocast", "PyTorch: compiled, autocast"]
    file = tmp_path / "gpu.json"
    chosen = tuple(name for name in NAMES if not name.endswith(left_out) and left_out[0] not in name)
    with patch("paceline.bench.gpu.peak_flops", lambda name, precision: 1e12):
        rows = gpu.measure(gpu.GpuBench(("nano",), chosen, rounds=2, steps=1, json=str(file)))
    assert [f"{row.system}: {row.setting}" for row in rows] == list(chosen)
    assert json.loads(file.read_text())["rows"][0]["device"] == "cpu"
    shape = preset("nano")
    for row in rows:
        assert (row.model, row.precision, row.batch, row.context) == ("nano", "bfloat16", 1, shape.context)
        assert row.tokens_per_second == pytest.approx(shape.context / row.median_ms * 1e3)
        assert row.mfu == pytest.approx(row.tokens_per_second * flops_per_token(shape, shape.context) / 1e12)
        assert 0 < row.host_ms <= row.median_ms + 1 and row.peak_bytes > 0
    table = capsys.readouterr().out
    assert all(name in table for name in chosen) and "MFU" in table


@pytest.mark.full
def test_a_device_of_unknown_peak_has_no_mfu_and_what_fails_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.dict(gpu.SHAPES, {"nano": (preset("nano").context, -1)}):
        assert gpu.measure(gpu.GpuBench(("nano",), ("paceline: zero 0",), rounds=1, steps=1)) == []
    assert "nano: paceline: zero 0 did not run" in capsys.readouterr().out
    (row,) = gpu.measure(gpu.GpuBench(("nano",), ("paceline: zero 0",), rounds=1, steps=1))
    assert row.mfu is None and "unknown" in capsys.readouterr().out
