"""How a GPU is measured, seen on the CPU with small sizes; tests/gpu has the real one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from paceline.calibrate import gpu
from paceline.calibrate.gpu import Measured
from paceline.core.errors import UserError
from paceline.measuring.cases import Case
from paceline.models.config import ModelConfig
from paceline.plan.kernels import seconds, total
from paceline.plan.profiles import hardware
from paceline.plan.work import Operation

FOUND = Measured({"float32": 5e13, "bfloat16": 7e14, "float16": 7e14}, 4e12, 3.5e14, 2e-5)


@pytest.fixture
def h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with an H200 that finds FOUND; how often it was measured."""
    asked: list[int] = []

    class Pool:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, *_: object, **__: object) -> list[Measured]:
            asked.append(1)
            return [FOUND]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu, "RankPool", Pool)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=10**11))
    return asked


def test_what_was_measured_takes_the_datasheets_place_and_links_stay(h200: list[int]) -> None:
    sheet, told = hardware("h200"), list[str]()
    found = gpu.here(report=told.append)
    assert "measuring this machine's GPU" in told[0]
    assert found.device.memory == 10**11
    assert (found.within, found.between, found.device.peak) == (sheet.within, sheet.between, sheet.device.peak)
    product = Operation("matmul", 1e15, 0.0, "bfloat16")
    assert seconds(product, found) == pytest.approx(1e15 / 7e14 / found.kernels.matmul_efficiency)
    assert seconds(Operation("attention", 1e15, 0.0, "bfloat16"), found) == pytest.approx(1e15 / 3.5e14)
    assert seconds(Operation("memory", 0.0, 4e12, "float32"), found) == pytest.approx(1.0)
    assert total([Operation("memory", 0.0, 1.0, "float32", count=1000)], found) == pytest.approx(1000 * 2e-5)


def test_it_is_measured_once_and_then_known(h200: list[int]) -> None:
    assert gpu.known() == hardware("h200")
    found = gpu.here()
    assert gpu.here() == found == gpu.known() and h200 == [1]


def test_a_gpu_of_unknown_links_is_refused() -> None:
    with patch.object(torch.cuda, "get_device_name", lambda device=None: "Toaster 9"):
        assert gpu.known() is None
        with pytest.raises(UserError, match=r"Toaster 9 is none of the GPUs .* --hardware FILE"):
            gpu.here()


@pytest.mark.full
def test_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SIZES", (64, 128))
    monkeypatch.setattr(gpu, "COPIED", 1 << 20)
    monkeypatch.setattr(
        gpu, "LONG", Case("long", ModelConfig(layers=1, width=64, heads=2, context=64, vocabulary=64), 1)
    )
    monkeypatch.setattr(gpu, "_STRETCH", 1e-3)
    found = gpu.measure("cpu")
    assert set(found.ceiling) == set(gpu.DTYPES) and all(rate > 1e6 for rate in found.ceiling.values())
    assert 1e8 < found.bandwidth < 1e13 and found.attention > 1e6 and 1e-7 < found.launch < 1e-2
