"""How long the engine's own ops take: what it does to parameters and gradients beside the model's computing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from paceline.calibrate.rates import line
from paceline.calibrate.repeated import cold
from paceline.measuring.cases import ADAMW
from paceline.models.config import ModelConfig
from paceline.models.transformer import Transformer
from paceline.plan.costs import OPTIMIZER_BYTES
from paceline.plan.hardware import Rates
from paceline.tensors.reduced_norm import norms_of

_NUMELS = (1 << 12, 1 << 16, 1 << 19, 1 << 21)


def engine_ops(repeats: int, shapes: Sequence[ModelConfig]) -> dict[str, Rates]:
    """Rates of the update, of copying gradients in, of casts, and of the squares that ranks add up.

    Args:
        repeats: How often each is timed.
        shapes: Models that are updated.
    """
    copies = {"copy_in": _copies(repeats, torch.float32), "cast": _copies(repeats, torch.bfloat16)}
    return {"update": _update(repeats, shapes), **copies, "squares": _squares(repeats)}


def _update(repeats: int, shapes: Sequence[ModelConfig]) -> Rates:
    """Seconds of fused AdamW for each byte that it reads and writes of fp32 parameters, gradients and states."""
    sizes, times = list[float](), list[float]()
    for config in shapes:
        model = Transformer(config)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        sizes.append(OPTIMIZER_BYTES * sum(each.numel() for each in model.parameters()))
        times.append(cold(optimizer.step, repeats))
    return line([0.0] * len(sizes), sizes, times)


def _copies(repeats: int, written: torch.dtype) -> Rates:
    """Rates of copying a unit's gradients into a bucket, or back in low precision; bytes as plans count them, 2 + 4."""
    sizes, times = list[float](), list[float]()
    for numel in _NUMELS:
        source, target = torch.ones(numel), torch.empty(numel, dtype=written)
        pairs = list(zip(target.split(numel // 4), source.split(numel // 4), strict=True))
        into, out = [each for each, _ in pairs], [each for _, each in pairs]
        sizes.append(6 * numel)
        times.append(cold(partial(torch._foreach_copy_, into, out), repeats))
    return line([0.0] * len(sizes), sizes, times)


def _squares(repeats: int) -> Rates:
    """Seconds of adding up the squares of a rank's gradients, for each byte of them."""
    sizes, times = list[float](), list[float]()
    for numel in _NUMELS:
        gradients = torch.ones(numel).split(numel // 4)
        sizes.append(4 * numel)
        times.append(cold(partial(norms_of, gradients, gradients[0].device), repeats))
    return line([0.0] * len(sizes), sizes, times)
