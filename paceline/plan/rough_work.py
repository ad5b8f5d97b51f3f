"""The work of a model that may not be traceable: what its matrices alone tell then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from paceline.core.errors import UserError
from paceline.models.units import find_units
from paceline.plan.example_inputs import Inputs, example_inputs
from paceline.plan.trace import trace
from paceline.plan.work import Operation, UnitWork, Work


def traced_or_rough(
    model: nn.Module,
    samples: int = 1,
    *,
    length: int = 0,
    inputs: Inputs | None = None,
    precision: str = "float32",
    device: Literal["cpu", "cuda"] = "cuda",
    units: Sequence[str] = (),
) -> Work:
    """As `trace`; of a model that cannot be traced what its matrices alone tell, with the reason as a warning."""
    try:
        return trace(model, samples, length=length, inputs=inputs, precision=precision, device=device, units=units)
    except UserError as error:
        try:
            rows = example_inputs(model, samples, length, inputs).tokens
        except UserError:
            rows = samples * max(1, length)
        told = f"{error}. {_ROUGH[rows > samples]}"
        return replace(rough_work(model, rows, samples, precision, units), warnings=(told,))


_ROUGH = tuple(
    f"Of its work only one product of each matrix for each {each} is counted: times and activations are rough, mostly "
    "too small, by far for convolutions and recurrent layers, and strategies that are told to fit may not"
    for each in ("sample", "token")
)
"""What is said of rough work, by whether rows are tokens."""


def rough_work(
    model: nn.Module, rows: int, samples: int, precision: str = "float32", units: Sequence[str] = ()
) -> Work:
    """Each matrix times `rows` rows, twice that backward (Kaplan et al. 2020), inputs and results kept.

    Tables that are only looked up do not count, and of frozen matrices no gradients are computed. Matrices that lie in
    one parameter, as those of a mixture's experts do, share the rows out. A convolution's places, attention and what
    lies between matrices are not known, so it is too little of all.

    Args:
        model: Any module.
        rows: Tokens of the micro-batch, or samples.
        samples: Samples of it.
        precision: As `Strategy.precision`.
        units: As `Strategy.units`.
    """
    dtype = precision if precision != "float32" else _dtype(model)
    itemsize = getattr(torch, dtype).itemsize
    kernels = {
        id(each)
        for part in model.modules()
        if isinstance(part, nn.modules.conv._ConvNd)
        for each in part.parameters(recurse=False)
    }
    parts = {name: list(unit.parameters()) for name, unit in find_units(model, units).items()}
    inside = {id(each) for own in parts.values() for each in own}
    multiplied = {name: _multiplied(unit) for name, unit in find_units(model, units).items()}
    # Parameters of the model itself, such as those of a model that is one layer.
    parts[""], multiplied[""] = [each for each in model.parameters() if id(each) not in inside], _multiplied(model)
    found = []
    for name, own in parts.items():
        forward, backward, kept, first = list[Operation](), list[Operation](), 0, 0
        for each in own:
            if each.dim() < 2 or id(each) not in multiplied[name]:
                continue
            stacked = 1 if each.dim() == 3 and id(each) not in kernels else 0
            columns, inner = each.shape[stacked], math.prod(each.shape[stacked + 1 :])
            shape = (1, rows, inner, columns)
            moved = float((rows * inner + each.numel() + rows * columns) * itemsize)
            forward.append(Operation("matmul", 2.0 * math.prod(shape), moved, dtype, shape))
            backward.append(Operation("matmul", 2.0 * math.prod(shape), moved, dtype, shape, 1 + each.requires_grad))
            kept += rows * (inner + columns) * itemsize
            first = first or rows * inner * itemsize
        if own:
            found.append(UnitWork(name, tuple(forward), tuple(backward[::-1]), kept, first, first))
    return Work(tuple(found), samples, rows, "rough")


def _multiplied(unit: nn.Module) -> set[int]:
    """`id`s of the parameters of a unit that are not only looked up in it."""
    parts = (part for part in unit.modules() if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    return {id(each) for part in parts for each in part.parameters(recurse=False)}


def _dtype(model: nn.Module) -> str:
    floating = next((each for each in model.parameters() if each.is_floating_point()), None)
    return "float32" if floating is None else str(floating.dtype).removeprefix("torch.")
