"""Hooks on parameters' gradients: whether autograd will add to one in this pass, and that it has."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from paceline.core.step_state import StepState
from paceline.hooks.refused_passes import in_transform
from paceline.tensors.assigned_gradient import gradient_of


class Follower(Protocol):
    """Follows backward passes.

    Attributes:
        state: Whether one is under way.
        fired: The `id()` of each parameter that autograd has added a gradient to in it.
        has_streams: Whether it is told of every gradient.
    """

    state: StepState
    fired: set[int]
    has_streams: bool

    def meet_gradient(self, parameter: nn.Parameter, is_sparse: bool) -> None:
        """Autograd adds, or is about to add, to a gradient, which is sparse, or nothing has told of the pass before."""
        ...


def watch_parameters(parameters: Iterable[nn.Parameter], follower: Follower, before: bool) -> list[RemovableHandle]:
    """Registers hooks around autograd's adding to `p.grad`; the handles remove them.

    They are called for every parameter of every step, and so have nothing around them. Python's collector does not see
    what hooks of tensors hold, so it is neither a parameter nor the follower.

    Args:
        parameters: Those that are trained.
        follower: Is told.
        before: Whether it is told of a pass before that adds to the first gradient.
    """
    handles, reference, state, fired = [], weakref.ref(follower), follower.state, follower.fired
    meets_all = follower.has_streams

    def after_it(parameter: nn.Parameter) -> None:
        is_sparse = type(gradient := gradient_of(parameter)) is Tensor and gradient.is_sparse
        if (is_sparse or meets_all or state.phase != "backward") and (alive := reference()) is not None:
            alive.meet_gradient(parameter, is_sparse)
        fired.add(id(parameter))

    def before_one(own: weakref.ref[nn.Parameter]) -> Callable[[Tensor], None]:
        def before_it(gradient: Tensor) -> None:
            if state.phase == "backward" or (alive := reference()) is None:
                return
            # It is also called where `torch.autograd.grad` takes the gradient.
            if (parameter := own()) is not None and is_accumulated(parameter):
                alive.meet_gradient(parameter, False)

        return before_it

    for parameter in parameters:
        if before:
            handles.append(parameter.register_hook(before_one(weakref.ref(parameter))))
        handles.append(parameter.register_post_accumulate_grad_hook(after_it))
    return handles


def will_accumulate(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the backward pass under way leaves gradients in one of these; `torch.autograd.grad` does not."""
    if in_transform():
        # It hands gradients out.
        return False
    try:
        return any(torch._C._will_engine_execute_node(accumulator(p)) for p in parameters if p.requires_grad)
    except RuntimeError:
        # A parameter is itself what autograd.grad was asked for.
        return False


def is_accumulated(parameter: nn.Parameter) -> bool:
    """Inside a hook of a parameter's gradient: whether autograd is to add that to `grad`, and not to hand it out.

    Also where the graph is from before its data were of another dtype for a while: it accumulates in another node than
    `accumulator` gives then.
    """
    if in_transform():
        return False
    try:
        torch._C._will_engine_execute_node(accumulator(parameter))
    except RuntimeError:
        # autograd.grad was asked for it. What it is not asked for has no hook called.
        return False
    return True


def is_complete(parameter: nn.Parameter) -> bool:
    """Whether the pass under way will not add to a parameter's gradient any more, if it has not yet."""
    try:
        return not torch._C._will_engine_execute_node(accumulator(parameter))
    except RuntimeError:
        # A pass inside it hands the gradient out, and it may be added later.
        return False


def accumulator(parameter: nn.Parameter) -> Node:
    """Where autograd accumulates a parameter's gradient: the node of all graphs that use it as it is now."""
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(parameter).node


def follow_accumulators(parameters: Iterable[nn.Parameter]) -> None:
    """Lets hooks of several parameters' gradients wait for the nodes that accumulate these now.

    Torch makes other ones when a parameter's data become of another dtype. What `register_multi_grad_hook` has made
    goes by those that it found when it was called, and would never call the user's function again.
    """
    for parameter in parameters:
        for hook in (parameter._backward_hooks or {}).values():
            if getattr(hook, "__module__", "") != torch.autograd.graph.__name__:
                continue
            nodes = inspect.getclosurevars(hook).nonlocals.get("grad_fns", [])
            nodes[:] = [accumulator(node.variable) if hasattr(node, "variable") else node for node in nodes]
