"""The nano preset trains without that the host waits for the GPU, but where a line is written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import paceline as pl
from tests.gpu.devices import on_a_gpu

pytestmark = on_a_gpu

STEPS, FIRST = 12, 3
"""Of the training; and the step from which on the host must not wait."""


@contextmanager
def watched() -> Iterator[list[str]]:
    """Inside, torch raises where the host waits in a training step; yields the modes in the order they were set."""
    meter = pytest.importorskip("paceline.train.meter", reason="paceline.train needs msgspec")
    optim = pytest.importorskip("paceline.train.optim", reason="paceline.train needs msgspec")
    update, read, modes = optim.Update.__call__, meter.Meter.read, list[str]()

    def become(mode: str) -> None:
        modes.append(mode)
        torch.cuda.set_sync_debug_mode(mode)

    def updated(self: Any, step: int, *args: Any) -> Any:
        norm = update(self, step, *args)
        if step + 1 == FIRST:
            become("error")
        return norm

    def reading(self: Any, *args: Any) -> Any:
        # What is written is read from the GPU.
        become("default")
        return read(self, *args)

    with patch.object(optim.Update, "__call__", updated), patch.object(meter.Meter, "read", reading):
        try:
            yield modes
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "flags", [(), ("--strategy.precision", "float32", "--tf32"), ("--strategy.zero", "3")], ids=str
)
def test_nano_is_trained_without_waiting(tmp_path: Path, flags: tuple[str, ...]) -> None:
    command_line = pytest.importorskip("paceline.train.command_line", reason="paceline.train needs msgspec")
    loop = pytest.importorskip("paceline.train.loop", reason="paceline.train needs tokenizers")
    drawn = random.Random(0)
    (tmp_path / "text.txt").write_text(" ".join(drawn.choices([f"word{n}" for n in range(60)], k=6000)))
    config = command_line.parse_train_arguments(
        [
            *("--model.preset", "nano", "--data.vocabulary", "300", "--data.path", str(tmp_path / "text.txt")),
            *("--data.cache", str(tmp_path / "cache"), "--folder", str(tmp_path / "run"), "--steps", str(STEPS)),
            *("--log.every", str(STEPS), "--log.validate-every", "0", "--checkpoint.every", "0", *flags),
        ]
    )
    pl.shutdown()
    with watched() as modes:
        assert loop.train(config) == 0
    assert modes == ["default", "error", "default"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_plan_measures_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = pytest.importorskip("paceline.cli", reason="paceline needs msgspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["plan", "--here", "--model", "gpt2-124m", "--devices", "1", "--batch-tokens", "16384"]
    assert command.main([*arguments, "--json", str(tmp_path / "plan.json")]) == 0
    assert list((tmp_path / "paceline" / "hardware").glob("gpu-*.json"))
