"""What a model's matrices alone tell of its work, where it cannot be traced."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from paceline.models.units import find_units
from paceline.plan.work import Operation, UnitWork, Work


def rough_work(
    model: nn.Module, rows: int, samples: int, precision: str = "float32", units: Sequence[str] = ()
) -> Work:
    """Each matrix times `rows` rows, twice that backward (Kaplan et al. 2020), inputs and results kept.

    Tables that are looked up do not count. A convolution's places, attention and what lies between matrices are not
    known, so it is too little of all.

    Args:
        model: Any module.
        rows: Tokens of the micro-batch, or samples.
        samples: Samples of it.
        precision: As `Strategy.precision`.
        units: As `Strategy.units`.
    """
    dtype = precision if precision != "float32" else _dtype(model)
    itemsize = getattr(torch, dtype).itemsize
    tables = {id(each) for part in model.modules() if isinstance(part, nn.Embedding) for each in part.parameters()}
    parts = {name: list(unit.parameters()) for name, unit in find_units(model, units).items()}
    inside = {id(each) for own in parts.values() for each in own}
    # Parameters of the model itself, such as those of a model that is one layer.
    parts[""] = [each for each in model.parameters() if id(each) not in inside]
    found = []
    for name, own in parts.items():
        forward, backward, kept, first = list[Operation](), list[Operation](), 0, 0
        for each in own:
            if each.dim() < 2 or id(each) in tables:
                continue
            columns, inner = each.shape[0], math.prod(each.shape[1:])
            shape = (1, rows, inner, columns)
            moved = float((rows * inner + inner * columns + rows * columns) * itemsize)
            forward.append(Operation("matmul", 2.0 * math.prod(shape), moved, dtype, shape))
            backward.append(Operation("matmul", 2.0 * math.prod(shape), moved, dtype, shape, 2))
            kept += rows * (inner + columns) * itemsize
            first = first or rows * inner * itemsize
        if own:
            found.append(UnitWork(name, tuple(forward), tuple(backward[::-1]), kept, first, first))
    return Work(tuple(found), samples, rows, "rough")


def _dtype(model: nn.Module) -> str:
    floating = next((each for each in model.parameters() if each.is_floating_point()), None)
    return "float32" if floating is None else str(floating.dtype).removeprefix("torch.")
