"""What a rank writes of a training: values, which go into the manifest, and its elements of tensors, copied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.checkpoint.given import Stateful
from paceline.checkpoint.module_states import extra_states, persistent_buffers, tied_names
from paceline.checkpoint.optimizer_states import OptimizerStates
from paceline.checkpoint.plain import encode, lack
from paceline.checkpoint.random_states import Generator, random_states
from paceline.checkpoint.ranges import Ranges
from paceline.checkpoint.writing import OwnPart
from paceline.core.errors import UserError
from paceline.engine.engine import Engine

_copies: WeakKeyDictionary[Engine, dict[str, Tensor]] = WeakKeyDictionary()
"""Memory of the copies that were made last, by name."""


def require_storable(engine: Engine, ranges: Ranges) -> None:
    """Makes sure that parameters and buffers can be written.

    Raises:
        UserError: One cannot.
    """
    parameters = ((name, ranges.local(index)) for index, name in enumerate(ranges.names))
    for name, tensor in (*parameters, *persistent_buffers(engine.module)):
        if (why := lack(tensor)) is not None:
            raise UserError(
                f"{name} is a tensor {why}, which a checkpoint cannot hold: give it another dtype or layout"
            )


def add_values(
    part: OwnPart,
    engine: Engine,
    states: OptimizerStates,
    schedulers: Sequence[Stateful],
    loader: Stateful | None,
    extra: Any,
    generators: Sequence[Generator] = (),
) -> None:
    """Adds to a rank's part what is said in JSON, and the tensors in it."""
    put = partial(_put, part)
    first = part.rank == 0
    # With shards, some states are known to the ranks alone that have elements.
    cut = engine.schedule.shards > 1
    part.values["optimizers"] = states.values(put) if first or cut else []
    if not first and not cut:
        part.values["optimizers"] = [{"states": {}} for _ in states.optimizers]
    part.values["random"] = encode(random_states(engine.world.device, generators), put, "the random states")
    part.values["loader"] = None if loader is None else encode(loader.state_dict(), put, "loader.state_dict()")
    if first:
        part.values["common"] = {
            "schedulers": [encode(one.state_dict(), put, "scheduler.state_dict()") for one in schedulers],
            "extra": encode(extra, put, "extra"),
            "modules": encode(extra_states(engine.module), put, "get_extra_state()"),
            "tied": tied_names(engine.module),
        }


def add_residuals(part: OwnPart, engine: Engine) -> None:
    """Adds the residuals of the gradients that this rank has sent encoded."""
    collectives = engine.program.collectives
    residuals = {} if collectives is None else collectives.saved_residuals()
    part.values["residuals"] = encode(residuals, partial(_put, part), "residuals of gradients")


def add_tensors(
    part: OwnPart, engine: Engine, ranges: Ranges, states: OptimizerStates, keeps_copies: bool = False
) -> None:
    """This rank's elements of parameters and of the optimizers' states, copied. A collective call.

    Args:
        part: Takes them.
        engine: The model's.
        ranges: Of its parameters.
        states: Of its optimizers.
        keeps_copies: Whether the memory of the copies is kept for those of the next call, which are made sooner, as
            memory that is new has to be cleared first. What the last call copied must not be needed any more.
    """
    kept = _copies.pop(engine, {}) if keeps_copies else {}
    used: dict[str, Tensor] = {}

    def add(name: str, start: int, elements: Tensor, shape: tuple[int, ...]) -> None:
        copy = kept.get(name)
        if copy is None or (copy.shape, copy.dtype) != (elements.shape, elements.dtype):
            copy = torch.empty(elements.shape, dtype=elements.dtype, device="cpu")
        used[name] = copy.copy_(elements)
        part.add(name, start, copy, shape)

    with torch.no_grad():
        for index, name in enumerate(ranges.names):
            local = ranges.local(index)
            add(f"model/{name}", *ranges.written(index, local, local.dtype), ranges.spec(index).shape)
        for state in states.of_elements():
            written = ranges.written(state.parameter, state.tensor, state.dtype)
            add(state.name, *written, ranges.spec(state.parameter).shape)
        if part.rank == 0:
            for name, buffer in persistent_buffers(engine.module):
                part.add(f"model/{name}", 0, _elements(buffer), tuple(buffer.shape))
    if keeps_copies:
        _copies[engine] = used


def _put(part: OwnPart, tensor: Tensor) -> str:
    """Adds a tensor of this rank's own; returns its name."""
    name = f"values of rank {part.rank}/{len(part.tensors)}"
    elements = _elements(tensor)
    part.add(name, 0, elements, tuple(elements.shape))
    return name


def _elements(tensor: Tensor) -> Tensor:
    """A copy of a tensor's elements in row-major order: one-dimensional, on the CPU."""
    copy = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.detach().reshape(-1))
