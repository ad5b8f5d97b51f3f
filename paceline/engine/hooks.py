"""Autograd and module hooks, turned into the engine's few verbs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

P = ParamSpec("P")
T = TypeVar("T")


class Listener(Protocol):
    """What the hooks tell. Units are told by name.

    `records` says whether a forward is part of training: one with a graph, or inside a reentrant checkpoint. Others
    (evaluation, activations computed again inside backward) are told because parameters are needed whole there too.
    """

    def model_begins(self, records: bool) -> None:
        """The whole model's forward begins."""
        ...

    def model_ends(self, records: bool) -> int:
        """The whole model's forward has ended; returns the generation of the weights it used."""
        ...

    def forward_begins(self, unit: str, records: bool) -> None:
        """A unit's forward begins."""
        ...

    def forward_ends(self, unit: str, records: bool, backward_follows: bool) -> int:
        """A unit's forward has ended, with or without a graph; returns the generation of the weights it used."""
        ...

    def in_forward(self) -> bool:
        """Whether a forward of the whole model is under way, of which this may be a part."""
        ...

    def backward_nears(self, unit: str, generation: int) -> None:
        """The first gradient of a unit with several outputs is there."""
        ...

    def backward_begins(self, unit: str | None, generation: int) -> None:
        """The backward of a unit begins, or (None) that of the whole model."""
        ...

    def wants_backward(self, unit: str) -> bool:
        """Whether a forward that recomputes activations inside backward must be listened to."""
        ...


def install(model: nn.Module, units: Mapping[str, nn.Module], listener: Listener) -> list[RemovableHandle]:
    """Registers hooks on a model and its units; the handles remove them.

    A unit's backward begins when the gradients of all its outputs are there; the parameters of every unit that ran
    after it then have theirs.
    """
    listener = _Untraced(listener)
    handles = [handle for name, module in units.items() for handle in _listen(module, name, listener)]

    # A deep copy of the model (an average of weights, say) copies these hooks, but is not the model.
    def model_begins(module: nn.Module, args: Any) -> None:
        if module is model:
            listener.model_begins(_records())

    def model_ends(module: nn.Module, args: Any, output: Any) -> None:
        if module is model:
            generation = listener.model_ends(_records())
            if _records():
                _on_gradients(output, "any", lambda: listener.backward_begins(None, generation))

    handles.append(model.register_forward_pre_hook(model_begins, prepend=True))
    handles.append(model.register_forward_hook(model_ends))
    return handles


class _Untraced:
    """A listener into which torch.compile does not look: its bookkeeping is no part of a model."""

    def __init__(self, listener: Listener) -> None:
        self.model_begins = _untraced(listener.model_begins)
        self.model_ends = _untraced(listener.model_ends)
        self.forward_begins = _untraced(listener.forward_begins)
        self.forward_ends = _untraced(listener.forward_ends)
        self.in_forward = _untraced(listener.in_forward)
        self.backward_nears = _untraced(listener.backward_nears)
        self.backward_begins = _untraced(listener.backward_begins)
        self.wants_backward = _untraced(listener.wants_backward)


def _untraced(method: Callable[P, T]) -> Callable[P, T]:
    hidden: list[Callable[P, T]] = []

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Only once somebody compiles: loading the compiler takes longer than most first steps.
        if not hidden and "torch._dynamo" in sys.modules:
            hidden.append(torch.compiler.disable(method))
        return (hidden[0] if hidden else method)(*args, **kwargs)

    return call


def cast_inputs(model: nn.Module, dtype: torch.dtype, applies: Callable[[], bool]) -> RemovableHandle:
    """Casts floating-point tensors that the model is called with to the dtype it computes in, while that `applies`."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, (args, kwargs)) if module is model and applies() else None

    return model.register_forward_pre_hook(before, with_kwargs=True)


def open_for_states(
    model: nn.Module, enter: Callable[[bool], None], leave: Callable[[], None]
) -> list[RemovableHandle]:
    """Calls `enter` before and `leave` after `state_dict` and `load_state_dict` of a model or a part of it.

    `enter` is told whether parameters will be written to.
    """
    handles = []
    for part in model.modules():
        # A deep copy copies these hooks too.
        def reads(module: nn.Module, *rest: Any, part: nn.Module = part) -> None:
            if module is part:
                enter(False)

        def writes(module: nn.Module, *rest: Any, part: nn.Module = part) -> None:
            if module is part:
                enter(True)

        def after(module: nn.Module, *rest: Any, part: nn.Module = part) -> None:
            if module is part:
                leave()

        handles += [
            part.register_state_dict_pre_hook(reads),
            part.register_state_dict_post_hook(after),
            part.register_load_state_dict_pre_hook(writes),
            part.register_load_state_dict_post_hook(after),
        ]
    return handles


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (activations are being recomputed, say)."""
    return bool(torch._C._current_graph_task_id() != -1)


def _records() -> bool:
    return torch.is_grad_enabled() and not in_backward()


def _listen(unit: nn.Module, name: str, listener: Listener) -> list[RemovableHandle]:
    given: set[Any] = set()

    # A reentrant checkpoint runs its part of the forward without gradients, and again inside backward with them.
    def records() -> bool:
        return not in_backward() and (torch.is_grad_enabled() or listener.in_forward())

    def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is unit:
            given.clear()
            given.update(tensor.grad_fn for tensor in _tensors((args, kwargs)))
            listener.forward_begins(name, records())

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        if module is not unit:
            return
        graph = torch.is_grad_enabled()
        follows = graph and (not in_backward() or listener.wants_backward(name))
        generation = listener.forward_ends(name, records(), follows)
        if follows:
            # What it only hands on is not its own: that tensor's gradient comes when earlier units have theirs.
            own = [tensor for tensor in _tensors(output) if tensor.grad_fn not in given]
            given.clear()
            _on_gradients(
                own,
                "all",
                lambda: listener.backward_begins(name, generation),
                lambda: listener.backward_nears(name, generation),
            )

    # First of all hooks: others, such as weight normalisation's, compute with the parameters.
    before = unit.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
    return [before, unit.register_forward_hook(ends)]


def _on_gradients(
    output: Any, mode: str, action: Callable[[], None], at_first: Callable[[], None] | None = None
) -> None:
    """Calls `action` once per backward pass, when any or all gradients of `output` are there.

    `at_first` is called before, when there are several and the first is.
    """
    # A parameter that is itself an output has nothing before it, and hooks on it would stay for good.
    tensors = [tensor for tensor in _tensors(output) if tensor.grad_fn is not None]
    if len(tensors) == 1:
        tensors[0].register_hook(lambda gradient: action())
    elif tensors:
        if at_first is not None:
            first = at_first
            register_multi_grad_hook(tensors, lambda gradient: first(), mode="any")
        register_multi_grad_hook(tensors, lambda gradients: action(), mode=mode)  # type: ignore[arg-type]


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a module's output, inside tuples, mappings and dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _tensors(getattr(leaf, field.name))
