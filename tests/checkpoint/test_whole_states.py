"""States of optimizers of whole parameters go on from a checkpoint, at whatever stage a rank may hold these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import paceline as pl
from tests.checkpoint.test_optimizer_states import model_of
from tests.quick import full

WHOLE = {
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.1),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.3, max_iter=3, history_size=2),
}
"""Optimizers of whole parameters, with states of their shape, of their rows, and in lists."""


def of_whole_ones(path: Path, name: str, zero: int, saves: bool) -> list[float]:
    """Losses of the last steps of a run that saves, or of one that goes on from there."""
    model = model_of(torch.float64, zero)
    optimizer = WHOLE[name](list(model.parameters()))

    def step(number: int) -> float:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    if saves:
        for number in range(3):
            step(number)
        pl.save(path, model, optimizer, step=3)
    else:
        pl.load(path, model, optimizer)
    return [step(number) for number in range(3, 6)]


@pytest.mark.filterwarnings("ignore:.*may need whole parameters")
@pytest.mark.parametrize(
    ("name", "zero", "later", "count"),
    [
        ("Adafactor", 1, 2, 2),
        full("Adafactor", 2, 0, 3),
        full("Muon", 0, 1, 3),
        ("Muon", 2, 1, 2),
        full("LBFGS", 2, 2, 3),
        ("LBFGS", 1, 0, 2),
    ],
)
def test_states_of_whole_parameters_go_on_at_every_stage(
    ranks, tmp_path: Path, name: str, zero: int, later: int, count: int
) -> None:
    (expected, *_) = ranks(2, of_whole_ones, tmp_path / "at 3", name, zero, True)
    for found in ranks(count, of_whole_ones, tmp_path / "at 3", name, later, False):
        assert found == pytest.approx(expected, rel=1e-9)
