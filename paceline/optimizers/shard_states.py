"""What optimizers hold where each rank updates its shards: which may, and states cut to go with a shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from paceline.buffers.flat_parameters import FlatParameters
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.optimizers.elementwise import (
    SHARD,
    has_begun,
    is_of_torch,
    needs_whole,
    require_elementwise,
    require_states_in_state,
    tell_of_memory,
)
from paceline.optimizers.no_part import OF_ALL, NoPart
from paceline.optimizers.own_dtypes import keep_dtypes, widen_states
from paceline.tensors.state_shard import StateShard, become_plain_state, become_state_shard


def prepare_optimizer(optimizer: Optimizer, flat: FlatParameters, strategy: Strategy) -> None:
    """Makes an optimizer step on shards: cuts states that it holds for whole parameters, which some make when built.

    Raises:
        UserError: The optimizer would compute something else from a shard than from the whole.
    """
    own, shards = flat.number
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)) and flat.has_followers:
        raise UserError(
            f"{type(optimizer).__name__} needs gradients on every rank, by which it decides what to update, and with "
            "collective=parameter_server rank 0 alone has any: set strategy.collective to all_reduce"
        )
    whole = needs_whole(optimizer, flat)
    widen_states(optimizer, flat)
    if whole:
        tell_of_memory(optimizer)
    if not (is_of_torch(optimizer) or has_begun(optimizer)) and (shards > 1 or flat.has_masters):
        require_states_in_state(optimizer, flat)
    if whole:
        require_states_of(optimizer, flat.index_of.__contains__)
        return
    require_states_of(optimizer, flat.index_of.__contains__, (own, shards), flat.cuts if shards > 1 else None)
    if shards > 1:
        require_elementwise(optimizer, strategy)
        for group in optimizer.param_groups:
            # It is saved and loaded with the states, which look alike on all ranks.
            known = _known(group)
            known += [None] * (len(group["params"]) - len(known))
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in flat.index_of:
                    known[place] = flat.cuts
            group[SHARD] = [own, shards, known]
    for parameter, states in optimizer.state.items():
        index = flat.index_of.get(id(parameter), -1)
        if isinstance(states, NoPart):
            states.clear()
        elif index in flat.local:
            _cut_states(type(optimizer).__name__, states, flat, index)


def mark_states(optimizer: Optimizer, flat: FlatParameters) -> None:
    """An optimizer has stepped on shards: until it does again, a loop sees its states as whole ones."""
    keep_dtypes(optimizer, flat)
    if flat.shards == 1 or needs_whole(optimizer, flat):
        return
    names: dict[Hashable, list[str]] = {}
    without: list[tuple[Tensor, int, Hashable]] = []
    for group in optimizer.param_groups:
        kind = _kind_of(group)
        for parameter in group["params"]:
            index = flat.index_of.get(id(parameter), -1)
            if (local := flat.local.get(index)) is None:
                continue
            states = optimizer.state.get(parameter)
            if not local.numel() and parameter.grad is not None and (not states or isinstance(states, NoPart)):
                without.append((parameter, index, kind))
                continue
            for name, state in states.items() if states else ():
                if type(state) is Tensor and state.dim() and state.shape == local.shape:
                    become_state_shard(state, flat.division(index).of_state(name))
                    if name not in (known := names.setdefault(kind, [])):
                        known.append(name)
                elif isinstance(state, _SEVERAL):
                    for inner in tree_leaves(state):
                        if type(inner) is Tensor and inner.dim() and inner.shape == local.shape:
                            become_state_shard(inner, flat.division(index).of_state(name))
    makes = False
    for parameter, index, kind in without:
        held, like, local = optimizer.state.get(parameter), names.get(kind, ()), flat.local[index]
        if not (isinstance(held, NoPart) and held.is_like(flat.division(index), like)):
            optimizer.state[parameter] = NoPart(flat.division(index), like, local.dtype, local.device)
            makes = True
    if makes:
        # In one order on all ranks, for loops over them.
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ordered = {parameter: optimizer.state.pop(parameter) for parameter in order if parameter in optimizer.state}
        ordered |= optimizer.state
        optimizer.state.clear()
        optimizer.state.update(ordered)


def _kind_of(group: dict[str, Any]) -> Hashable:
    """What decides which states an optimizer holds: its switches, and whether there is any momentum."""
    switches = tuple((name, value) for name, value in group.items() if isinstance(value, bool))
    return switches, bool(group.get("momentum"))


def require_states_of(
    optimizer: Optimizer, looks_at: Callable[[int], bool], number: tuple[int, int] = (0, 1), cuts: int | None = None
) -> None:
    """Refuses states of other shards than those that an optimizer is about to update.

    Args:
        optimizer: Any.
        looks_at: Which of its parameters are meant, by their `id()`.
        number: Which shard of each of these this rank updates, of how many; by default they are whole.
        cuts: See `FlatParameters`; None where they are whole.

    Raises:
        UserError: It holds states of another shard.
    """
    for group in optimizer.param_groups:
        for parameter, its in zip(group["params"], _known(group), strict=False):
            # Of a parameter's other elements it may hold as many, or none, and would then begin anew.
            if its in (None, cuts) or not (looks_at(id(parameter)) and _is_held(optimizer.state.get(parameter))):
                continue
            (theirs, of), (own, shards) = group[SHARD][:2], number
            updates = f"this rank updates shard {own} of {shards}" if shards > 1 else "parameters are whole now"
            if (theirs, of) != number:
                raise UserError(
                    f"{type(optimizer).__name__} holds states of shard {theirs} of {of}, but {updates}: load on each "
                    "rank what that rank saved, with the same strategy and number of ranks, or the states of one "
                    "process; or make a new optimizer"
                )
            raise UserError(
                f"{type(optimizer).__name__} holds states of shards that were cut otherwise, before the model's "
                "parameters or the strategy changed: make a new optimizer, or let pl.save and pl.load carry the states "
                "over"
            )


def _is_held(states: Mapping[str, Any] | None) -> bool:
    """Whether an optimizer holds states of a parameter, on this rank or on others: SGD without momentum has none."""
    if isinstance(states, NoPart):
        return states.has_others
    return states is not None and any(state is not None for state in states.values())


def _known(group: dict[str, Any]) -> list[int | None]:
    """How each parameter of a group was cut when its states were made."""
    return list(group[SHARD][2]) if SHARD in group else []


def takes_empty_parts(optimizer: Optimizer) -> bool:
    """Whether it is given parameters of which this rank has no element, with such a gradient, and has states of them.

    Torch's own `step()` passes over a parameter without a gradient, which costs no time and no state. Another one, of a
    class that may be made of torch's, need not ask for one.
    """
    return not type(optimizer).step.__module__.startswith("torch.optim.")


def _cut_states(optimizer: str, states: dict[str, Any], flat: FlatParameters, index: int) -> None:
    """Makes what an optimizer holds for one parameter go with this rank's shard of it."""
    shape = flat.local[index].shape
    for name, state in states.items():
        if type(state) is StateShard:
            become_plain_state(state)
            if state.shape == shape:
                # As nearly all are, from the second step on.
                continue
        if isinstance(state, _SEVERAL):
            _cut_several(state, flat, index)
        if not isinstance(state, Tensor) or (not state.dim() and name in OF_ALL):
            continue
        spec = flat.layout.slots[index].spec
        if tuple(state.shape) == spec.shape:
            if state.shape != shape:
                states[name] = flat.cut(index, state, state.dtype)
        elif flat.shards > 1 and state.shape != shape and state.dim():
            raise UserError(
                f"{optimizer} holds {name} of shape {list(state.shape)} for {spec.name}, of which "
                f"this rank updates {shape.numel()} elements: load states that were saved with the same strategy "
                "and number of ranks, or those of one process"
            )


_SEVERAL = (dict, list, tuple, deque)
"""What an optimizer may hold several tensors in, such as momenta of different decay."""


def _cut_several(held: Any, flat: FlatParameters, index: int) -> None:
    """The same of what is in a collection, which stays the object that it is."""
    for inner in tree_leaves(held):
        if type(inner) is StateShard:
            become_plain_state(inner)
    if not isinstance(held, (dict, list)):
        return
    for key, inner in list(held.items() if isinstance(held, dict) else enumerate(held)):
        if isinstance(inner, _SEVERAL):
            _cut_several(inner, flat, index)
        elif isinstance(inner, Tensor) and tuple(inner.shape) == flat.layout.slots[index].spec.shape:
            held[key] = inner if inner.shape == flat.local[index].shape else flat.cut(index, inner, inner.dtype)
