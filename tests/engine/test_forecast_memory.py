"""What one step's tensors take on a rank, beside what the planner says of it."""

from __future__ import annotations

import pytest
import torch

import paceline as pl
from paceline.core.strategy import Strategy
from paceline.measuring.alive import AliveBytes
from paceline.models.config import ModelConfig
from paceline.models.transformer import Transformer
from paceline.plan.footprint import footprint
from paceline.plan.trace import trace
from tests.quick import diagonal

SIZES = {
    "many weights": (ModelConfig(layers=4, width=192, heads=4, context=32, vocabulary=512), 1),
    "many tokens": (ModelConfig(layers=4, width=64, heads=4, context=128, vocabulary=256), 4),
    "llama": (
        ModelConfig(
            layers=4,
            width=128,
            heads=4,
            kv_heads=2,
            ff=352,
            context=64,
            vocabulary=1024,
            norm="rmsnorm",
            position="rotary",
            activation="swiglu",
            bias=False,
            tied=False,
        ),
        2,
    ),
}
"""Models and sequences of a micro-batch."""

WORLDS = {f"zero {zero}, N={n}": (n, zero) for n, zero in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3))}

QUICK = {("llama", "zero 3, N=2", "float32", "none"), ("llama", "zero 3, N=2", "bfloat16", "unit")}


def fullest(size: str, zero: int, precision: str, how: str) -> tuple[int, int]:
    """(measured, predicted) bytes of a rank's fullest moment: buffers and states, and tensors that a step makes."""
    config, samples = SIZES[size]
    torch.manual_seed(0)
    model = pl.parallelize(Transformer(config), Strategy(zero=zero, precision=precision, recompute=how))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocabulary, (samples, config.context))

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with AliveBytes() as alive:
        step()
    engine = pl.engine_of(model)
    engine.settle()
    with torch.device("meta"):
        shapes = Transformer(config)
    work = trace(shapes, samples, length=config.context, precision=precision, device="cpu")
    plan = footprint(work, engine.schedule)
    found = plan.steady + alive.peak, plan.peak
    pl.barrier()
    pl.release(model)
    return found


@pytest.mark.parametrize(
    ("size", "world", "precision", "how"),
    diagonal({size: size for size in SIZES}, WORLDS, ["float32", "bfloat16"], ["none", "unit"], quick=QUICK),
)
def test_the_fullest_moment_is_that_of_the_plan(
    ranks, size: str, world: tuple[int, int], precision: str, how: str
) -> None:
    n, zero = world
    for measured, predicted in ranks(n, fullest, size, zero, precision, how):
        assert predicted == pytest.approx(measured, rel=0.03)
