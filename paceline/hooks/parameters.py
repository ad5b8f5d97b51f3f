"""What autograd does to parameters' gradients: whether it will add to one in this pass, and that it has."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from paceline.hooks.modules import in_transform

Owner = TypeVar("Owner")


def watch_parameters(
    parameters: Iterable[nn.Parameter],
    owner: Owner,
    before: Callable[[Owner, nn.Parameter], None] | None,
    after: Callable[[Owner, nn.Parameter], None],
) -> list[RemovableHandle]:
    """Registers hooks around autograd's adding to `p.grad`; the handles remove them.

    They call for as long as the owner lives, which Python's collector does not see hooks of tensors hold. As they do so
    for every parameter of every step, there is nothing else around the two functions.

    Args:
        parameters: Those that are trained.
        owner: Is what the functions are given first.
        before: Is called before it, and also where `torch.autograd.grad` takes the gradient; None: nobody asks.
        after: Is called after it.
    """
    handles, reference = [], weakref.ref(owner)

    def after_it(parameter: nn.Parameter) -> None:
        if (alive := reference()) is not None:
            after(alive, parameter)

    for parameter in parameters:
        if before is not None:
            handles.append(parameter.register_hook(_before_one(weakref.ref(parameter), reference, before)))
        handles.append(parameter.register_post_accumulate_grad_hook(after_it))
    return handles


def _before_one(
    reference: weakref.ref[nn.Parameter], owner: weakref.ref[Owner], before: Callable[[Owner, nn.Parameter], None]
) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        alive, parameter = owner(), reference()
        if alive is not None and parameter is not None:
            before(alive, parameter)

    return hook


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
