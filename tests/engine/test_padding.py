"""NaN in what is only padding, of a batch or of the engine's own buffers, reaches neither norms nor weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import paceline as pl
from paceline.core.strategy import Strategy
from paceline.engine.engine import Engine
from tests.engine.models import Stack, assert_all_same, data, every_world, in_parallel, loss_on, make, rows_of, snapshot

MAX_NORM = 0.05
"""Less than the norms here, so that clipping changes what comes after it."""


def clip(model: nn.Module) -> torch.Tensor:
    if not hasattr(model, "_paceline_engine"):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    reduced = pl.engine_of(model).norm.as_reduced()
    norm = pl.clip_grad_norm_(model, MAX_NORM)
    torch.testing.assert_close(reduced, norm, atol=1e-12, rtol=0)
    return norm


def assert_sound(found: list[dict], expected: list[dict]) -> None:
    assert_all_same(found, expected)
    assert all(value.isfinite().all() for step in found for value in step.values())
    assert all(step["norm"] > 2 * MAX_NORM for step in found)


def padded(model: nn.Module) -> list[dict]:
    """Trains on batches of which a third is padding, here more and there less."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(3):
        x, y = data(step, 12)
        targets = torch.arange(12)
        targets[[0, 1, 4, 10]] = -100
        x[targets == -100] = torch.nan
        x, y, targets = (rows_of(model, part) for part in (x, y, targets))
        kept = targets != -100
        ((model(x[kept]) - y[kept]).square().sum() / 8).backward()
        norm = clip(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append({"norm": norm, **snapshot(model)})
    return found


@every_world
def test_clipping_ignores_nan_in_rows_that_the_loss_masks_out(ranks, strategy, n) -> None:
    expected = padded(make())
    for found in ranks(n, in_parallel, replace(strategy, gradients="sum"), Stack, padded):
        assert_sound(found, expected)


def poison(engine: Engine) -> int:
    """Fills the gradient buffers with NaN, as if all that steps leave in them were lost; returns how many are padding.

    Where a gradient belongs is written before it is read, so what stays NaN is what lies between gradients.
    """
    gradients = engine.program.gradients
    if gradients is None:
        return 0
    for bucket in engine.schedule.reduced_buckets:
        gradients.flat.whole(bucket).fill_(torch.nan)
        gradients.flat.reduced(bucket).fill_(torch.nan)
    buckets = engine.schedule.reduced_buckets
    return sum(bucket.numel - sum(engine.layout.slots[i].spec.numel for i in bucket.slots) for bucket in buckets)


def clipped(model: nn.Module) -> list[dict]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(3):
        if step and hasattr(model, "_paceline_engine"):
            engine = pl.engine_of(model)
            assert poison(engine) > 0 or engine.program.gradients is None
        loss_on(model, step).backward()
        norm = clip(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append({"norm": norm, **snapshot(model)})
    return found


def remains(strategy: Strategy) -> tuple[list[dict], bool]:
    """Also whether NaN is still there at the end: if not, nothing was shown."""
    model = pl.parallelize(make(), strategy)
    found = clipped(model)
    engine = pl.engine_of(model)
    gradients = engine.program.gradients
    still = gradients is None or any(gradients.flat.reduced(b).isnan().any() for b in engine.schedule.reduced_buckets)
    pl.release(model)
    return found, bool(still)


@every_world
def test_nan_between_gradients_in_their_buffers_changes_nothing(ranks, strategy, n) -> None:
    expected = clipped(make())
    results = ranks(n, remains, strategy)
    for found, _ in results:
        assert_sound(found, expected)
    assert any(still for _, still in results)
