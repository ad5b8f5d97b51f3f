"""How long a step takes the host, with events and without."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from tests.gpu.devices import on_a_gpu
from tests.gpu.loop import POLICIES, make

pytestmark = on_a_gpu


def host_seconds(model: nn.Module, x: Tensor, steps: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step: Callable[[], None]

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = (time.perf_counter() - start) / steps
    torch.cuda.synchronize()
    return seconds


def test_the_host_is_told_how_long_a_step_takes_it(gpu: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2, 4, device=gpu)
    told = {"PyTorch": host_seconds(make(torch.float32, gpu), x, 50)}
    for on in (False, True):
        model = pl.parallelize(make(torch.float32, gpu), replace(POLICIES["zero 2, auto"], precision="float32"))
        pl.engine_of(model).record_events(on)
        told["recorded" if on else "not recorded"] = host_seconds(model, x, 50)
        assert bool(pl.engine_of(model).drain_events()) is on
        pl.release(model)
    with capsys.disabled():
        print("\nhost, ms a step of a model of 22 parameters:", {k: round(1e3 * v, 3) for k, v in told.items()})
