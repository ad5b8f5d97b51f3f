"""What programs do on one GPU: reentrant checkpoints, exceptions in hooks, the README and the examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paceline as pl
from paceline.core.strategy import Strategy
from tests.gpu.devices import SECONDS, on_a_gpu
from tests.gpu.loop import POLICIES, Net, assert_same, make, train

pytestmark = on_a_gpu

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


class Reentrant(nn.Module):
    """A block whose inside is computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=True)
        return y


def reentrant(device: torch.device) -> Net:
    model = make(torch.float64, device)
    model.blocks = nn.ModuleList(Reentrant(block) for block in model.blocks)
    return model


@pytest.mark.parametrize("name", POLICIES)
def test_reentrant_checkpoints(gpu: torch.device, name: str) -> None:
    expected = train(reentrant(gpu), torch.float64, gpu)
    model = pl.parallelize(reentrant(gpu), POLICIES[name])
    found = train(model, torch.float64, gpu)
    pl.release(model)
    assert_same(found, expected, atol=1e-11)


def fails(gradient: Tensor) -> None:
    raise ValueError("a broken loss")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_in_a_hook_one_rank_goes_on(gpu: torch.device, where: str, zero: Any) -> None:
    expected = train(make(torch.float64, gpu), torch.float64, gpu)
    model = pl.parallelize(make(torch.float64, gpu), Strategy(zero=zero, bucket_mb=1e-3))
    x = torch.ones(2, 4, device=gpu, dtype=torch.float64)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if where == "forward":
            raise ValueError("a broken model")
        output.register_hook(fails)

    handle = model.blocks[1].register_forward_hook(hook)
    with pytest.raises(ValueError, match="broken"):
        model(x).sum().backward()
    handle.remove()
    pl.reset(model)
    found = train(model, torch.float64, gpu)
    pl.release(model)
    assert_same(found, expected, atol=1e-11)


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


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", code],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0", **env},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.parametrize("name", ["three_lines.py", "manual_loop.py", "accumulation.py"])
def test_examples(name: str) -> None:
    ran = run((ROOT / "examples" / name).read_text(), PYTHONPATH="examples")
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"1 ranks, loss 0\.0", ran.stdout), ran.stdout


def test_the_readmes_loop() -> None:
    blocks = PYTHON.findall((ROOT / "README.md").read_text())
    assert blocks
    ran = run(blocks[0])
    assert ran.returncode == 0, ran.stderr
