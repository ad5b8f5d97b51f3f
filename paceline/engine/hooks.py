"""Autograd and module hooks, turned into the engine's few verbs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class Listener(Protocol):
    """What the hooks tell. Units are told by name."""

    def forward_begins(self, unit: str) -> None:
        """A unit's forward begins."""
        ...

    def forward_ends(self, unit: str, backward_follows: bool) -> int:
        """A unit's forward has ended, with or without a graph; returns the generation of the weights it used."""
        ...

    def in_forward(self) -> bool:
        """Whether a forward of the whole model is under way, of which this may be a part."""
        ...

    def model_begins(self) -> None:
        """The whole model's forward begins."""
        ...

    def model_ends(self) -> int:
        """The whole model's forward has ended; returns the generation of the weights it used."""
        ...

    def backward_begins(self, unit: str | None, generation: int) -> None:
        """The backward of a unit begins, or (None) that of the whole model."""
        ...

    def wants_backward(self, unit: str) -> bool:
        """Whether a forward that recomputes activations inside backward must be listened to."""
        ...


def install(model: nn.Module, units: Mapping[str, nn.Module], listener: Listener) -> list[RemovableHandle]:
    """Registers hooks on a model and its units; the handles remove them.

    Forward passes without gradients (evaluation) tell nothing. A unit's backward begins when the gradients of
    all its outputs are there; the parameters of every unit that ran after it then have theirs.
    """
    handles = [handle for name, module in units.items() for handle in _listen(module, name, listener)]

    # A deep copy of the model (an average of weights, say) copies these hooks, but is not the model.
    def model_begins(module: nn.Module, args: Any) -> None:
        if module is model and _records():
            listener.model_begins()

    def model_ends(module: nn.Module, args: Any, output: Any) -> None:
        if module is model and _records():
            generation = listener.model_ends()
            _before_backward(output, "any", lambda: listener.backward_begins(None, generation))

    handles.append(model.register_forward_pre_hook(model_begins))
    handles.append(model.register_forward_hook(model_ends))
    return handles


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (activations are being recomputed, say)."""
    return bool(torch._C._current_graph_task_id() != -1)


def _records() -> bool:
    return torch.is_grad_enabled() and not in_backward()


def _listen(unit: nn.Module, name: str, listener: Listener) -> list[RemovableHandle]:
    # A reentrant checkpoint runs its part of the forward without gradients, and again inside backward with them.
    def records() -> bool:
        return not in_backward() and (torch.is_grad_enabled() or listener.in_forward())

    def begins(module: nn.Module, args: Any) -> None:
        if module is unit and records():
            listener.forward_begins(name)

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        if module is unit and (records() or (torch.is_grad_enabled() and listener.wants_backward(name))):
            graph = torch.is_grad_enabled()
            generation = listener.forward_ends(name, graph)
            if graph:
                _before_backward(output, "all", lambda: listener.backward_begins(name, generation))

    return [unit.register_forward_pre_hook(begins), unit.register_forward_hook(ends)]


def _before_backward(output: Any, mode: str, action: Callable[[], None]) -> None:
    """Calls `action` once per backward pass, before anything that produced `output` is differentiated."""
    # A parameter that is itself an output has nothing before it, and hooks on it would stay for good.
    tensors = [tensor for tensor in _tensors(output) if tensor.grad_fn is not None]
    if len(tensors) == 1:
        tensors[0].register_hook(lambda gradient: action())
    elif tensors:
        register_multi_grad_hook(tensors, lambda gradients: action(), mode=mode)  # type: ignore[arg-type]


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a module's output, inside tuples, mappings and dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _tensors(getattr(leaf, field.name))
