"""What is timed is the same training: every system's losses are those of a plain loop on the whole batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline.bench.ranks import run_ranks
from paceline.bench.strategies import systems
from paceline.measuring.cases import ADAMW, GROUPS, Case, Precision, System
from paceline.models.presets import preset

CASE = Case("nano", preset("nano"), 2)
RANKS = 2
STEPS = 3
# Steps so large that a wrong one shows, and an eps of the gradients' size: without it AdamW does not tell
# gradients from twice the gradients.
SETTINGS = {**ADAMW, "lr": 1e-2, "eps": 1e-2}
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def labels(precision: Precision) -> list:
    missing = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra deepspeed is missing")
    return [
        pytest.param(system.label, marks=missing if system.name == "DeepSpeed" else ())
        for system in systems(precision)
        if system.name != "one process"
    ]


def train_each(jobs: Sequence[tuple[Precision, System]]) -> dict[tuple[str, str], list[float] | str]:
    world = pl.init()
    ADAMW.update(SETTINGS)
    linear = F.linear
    found: dict[tuple[str, str], list[float] | str] = {}
    for precision, system in jobs:
        try:
            step = system.build(CASE, world, precision).step
            found[precision, system.label] = [float(step()) for _ in range(STEPS)]
        except Exception as error:
            found[precision, system.label] = f"{type(error).__name__}: {error}"
        assert F.linear is linear, f"{system.label} changed torch for all others in the process"
    pl.shutdown()
    return found


@pytest.fixture(scope="module")
def losses() -> dict[tuple[str, str], list[float]]:
    """Losses of each step by precision and system: means over the ranks, and so over the whole batch."""
    jobs = [(precision, system) for precision in PRECISIONS for system in systems(precision)]
    results = run_ranks(RANKS, train_each, jobs, timeout=120)
    means = {}
    for key, mine in results[0].items():
        each = [result[key] for result in results]
        means[key] = mine if isinstance(mine, str) else [sum(step) / RANKS for step in zip(*each, strict=True)]
    return means


@pytest.fixture(scope="module")
def expected() -> list[float]:
    model = CASE.build()
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    data = zip(*(CASE.data(rank, torch.device("cpu")) for rank in range(RANKS)), strict=True)
    inputs, targets = (torch.cat(parts) for parts in data)
    found = []
    for _ in range(STEPS):
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.full
@pytest.mark.parametrize("label", labels("float32"))
def test_losses_are_those_of_one_process_with_the_whole_batch(label: str, losses, expected) -> None:
    assert losses["float32", label] == pytest.approx(expected, abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("label", labels("bfloat16"))
def test_losses_in_bfloat16_are_near_to_those(label: str, losses, expected) -> None:
    found = losses["bfloat16", label]
    assert found[0] != expected[0], "not computed in bfloat16"
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("setting", ["no communication", "no communication, meeting once a step"])
def test_without_communication_the_losses_would_be_others(losses, expected, setting: str) -> None:
    found = losses["float32", f"one process: {setting}"]
    assert found[0] == pytest.approx(expected[0], abs=1e-4)
    assert found != pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_stage_has_peers_and_a_row_of_ours(precision: Precision) -> None:
    for group in GROUPS:
        names = {system.name for system in systems(precision) if group in system.groups}
        assert {"one process", "paceline"} < names
        assert len(names) > 2
