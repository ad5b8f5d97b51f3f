"""What modules keep besides parameters: buffers that belong to `state_dict`, and states of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from paceline.models.units import named_parameters


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers by their names in `state_dict`, each once."""
    seen: set[int] = set()
    for name, buffer in _buffers(model):
        if id(buffer) not in seen:
            seen.add(id(buffer))
            yield name, buffer


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names that parameters and buffers have in `state_dict`, and the first name of each."""
    first: dict[int, str] = {}
    tied = {}
    state = named_parameters(model, remove_duplicate=False)
    for name, tensor in (*state, *_buffers(model)):
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
    return tied


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules that define `get_extra_state` return, by the modules' names."""
    return {name: module.get_extra_state() for name, module in _with_extra_states(model)}


def set_extra_states(model: nn.Module, states: dict[str, Any]) -> None:
    """Gives modules what `extra_states` returned."""
    for name, module in _with_extra_states(model):
        if name in states:
            module.set_extra_state(states[name])


def _with_extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to `state_dict`, under each of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
