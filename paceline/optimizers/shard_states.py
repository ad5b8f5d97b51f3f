"""What optimizers hold where each rank updates its shards: which may, and states cut to go with a shard."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from paceline.buffers.flat_parameters import FlatParameters
from paceline.core.errors import EngineError, UserError
from paceline.core.strategy import Strategy
from paceline.tensors.state_shard import StateShard, become_state_shard

ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
"""Optimizers whose update of an element depends on that element alone, so that a shard can be updated by itself."""

OF_ALL = frozenset({"step", "mu_product", "eta", "mu"})
"""States of torch's optimizers that are one number for all elements of a parameter."""

SHARD = "paceline_shard"
"""Key of a parameter group: which shard the states are of, of how many, where that is one for all models of an
optimizer, and for each parameter `cuts` of its model: None before its first step, and where it is whole."""


def elementwise(optimizer: type[Optimizer]) -> type[Optimizer]:
    """Vouches that an optimizer class updates each element from that element's gradient and state alone.

    Usable as a decorator. Only such optimizers may update sharded parameters.
    """
    ELEMENTWISE.add(optimizer)
    return optimizer


def needs_whole(optimizer: Optimizer, flat: FlatParameters) -> bool:
    """Whether an optimizer is shown whole parameters and gradients, on every rank, where ranks have shards of them.

    So is one that keeps whole tensors of its own. At zero 3 it is refused instead, as no rank is to hold these.
    """
    if flat.shards == 1 or flat.is_sharded:
        return False
    if type(optimizer) not in ELEMENTWISE:
        return True
    # Lists that it makes once it steps are of shards, and on some rank these may be whole.
    return not (_is_of_torch(optimizer) or _has_begun(optimizer)) and _listed(optimizer, flat) is not None


def _has_begun(optimizer: Optimizer) -> bool:
    """Whether it has stepped on shards."""
    return any(SHARD in group for group in optimizer.param_groups)


_told: set[type[Optimizer]] = set()


def _tell_of_memory(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if kind not in _told:
        _told.add(kind)
        why, instead = (
            ("has a whole tensor for each parameter outside of its state", "keep them in self.state[parameter]")
            if kind in ELEMENTWISE
            else (
                "may need whole parameters or norms across them",
                "if each element's update depends on that element alone, vouch for it with "
                f"pl.elementwise({kind.__name__})",
            )
        )
        warnings.warn(
            f"{kind.__name__} {why}, so every rank gathers all gradients, holds its states for all parameters and "
            f"updates all, as at zero 0: {instead}",
            stacklevel=2,
        )


def prepare_optimizer(optimizer: Optimizer, flat: FlatParameters, strategy: Strategy) -> None:
    """Makes an optimizer step on shards: cuts states that it holds for whole parameters, which some make when built.

    Raises:
        UserError: The optimizer would compute something else from a shard than from the whole.
    """
    own, shards = flat.number
    if getattr(optimizer.state, "default_factory", None) is NoStates:
        optimizer.state.default_factory = dict
    if isinstance(optimizer, torch.optim.LBFGS) and flat.has_followers:
        raise UserError(
            "LBFGS decides by gradients whether it goes on, and with collective=parameter_server rank 0 alone has any: "
            "set strategy.collective to all_reduce"
        )
    whole = needs_whole(optimizer, flat)
    if whole:
        _tell_of_memory(optimizer)
    if not (_is_of_torch(optimizer) or _has_begun(optimizer)) and (shards > 1 or flat.has_masters):
        _require_states_in_state(optimizer, flat)
    if whole:
        require_states_of(optimizer, flat.index_of.__contains__)
        return
    require_states_of(optimizer, flat.index_of.__contains__, (own, shards), flat.cuts if shards > 1 else None)
    if shards > 1:
        _require_elementwise(optimizer, strategy)
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
        if index in flat.local:
            _cut_states(type(optimizer).__name__, states, flat, index)


class MissingStateError(EngineError, KeyError):
    """A state was asked for of a parameter of which this rank has no part. Also what a dictionary raises."""

    __str__ = Exception.__str__


class NoStates(dict[str, Any]):
    """What an optimizer holds for a parameter of which this rank has no part, as a loop finds it between steps."""

    def __missing__(self, name: str) -> NoReturn:
        """Says why there is nothing.

        Raises:
            MissingStateError: Always.
        """
        raise MissingStateError(
            f"the optimizer's {name} of a parameter of which this rank's shard has no element: its states are on the "
            "ranks that update it. Go over optimizer.state.items(), ask `if optimizer.state[p]:` first, or set "
            "strategy.zero to 0"
        )

    def __reduce__(self) -> Any:
        """A file has a plain dictionary."""
        return (OrderedDict, (list(self.items()),))


def mark_states(optimizer: Optimizer, flat: FlatParameters) -> None:
    """An optimizer has stepped on shards: until it does again, its states say so to who takes them for whole ones."""
    if flat.shards == 1 or needs_whole(optimizer, flat):
        return
    if getattr(optimizer.state, "default_factory", None) is dict:
        optimizer.state.default_factory = NoStates
    for parameter, states in optimizer.state.items():
        index = flat.index_of.get(id(parameter), -1)
        local = flat.local.get(index)
        if local is None:
            continue
        shape = local.shape
        if not states:
            optimizer.state[parameter] = NoStates()
        for name, state in states.items():
            if type(state) is Tensor and state.shape == shape:
                become_state_shard(state, f"{name} of {flat.layout.slots[index].spec.name}")


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
    if not optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter, its in zip(group["params"], _known(group), strict=False):
            # Of a parameter's other elements it may hold as many, or none, and would then begin anew.
            if its in (None, cuts) or not looks_at(id(parameter)):
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


def _known(group: dict[str, Any]) -> list[int | None]:
    """How each parameter of a group was cut when its states were made."""
    return list(group[SHARD][2]) if SHARD in group else []


def _require_elementwise(optimizer: Optimizer, strategy: Strategy) -> None:
    if type(optimizer) not in ELEMENTWISE:
        raise UserError(
            f"{type(optimizer).__name__} may need whole parameters or norms across them, but with zero={strategy.zero} "
            "each rank holds its own shards alone: set strategy.zero to 2 or less, where every rank updates all then, "
            "or use one of torch's elementwise optimizers (AdamW, SGD, ...); vouch for one of your own with "
            "pl.elementwise(YourOptimizer)"
        )


def _is_of_torch(optimizer: Optimizer) -> bool:
    """Whether torch has the class, as it is."""
    return type(optimizer).__module__.startswith("torch.optim.")


def takes_empty_parts(optimizer: Optimizer) -> bool:
    """Whether it is given parameters of which this rank has no element, with such a gradient, and has states of them.

    What is torch's, or made of it, passes over a parameter without a gradient, which costs no time and no state.
    Others need not ask for one.
    """
    made_of = (base for base in type(optimizer).__mro__ if base is not Optimizer)
    return not any(base.__module__.startswith("torch.optim.") for base in made_of)


def _listed(optimizer: Optimizer, flat: FlatParameters) -> tuple[str, list[Tensor]] | None:
    """The tensors that an optimizer made for its parameters, one for each, elsewhere than in its `state`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, kept in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults") or not isinstance(kept, (list, tuple, dict)):
            continue
        tensors = [
            each for each in tree_leaves(kept) if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)
        ]
        if tensors and [each.shape for each in tensors] == [_shape_of(p, flat) for p in parameters]:
            return name, tensors
    return None


def _shape_of(parameter: Tensor, flat: FlatParameters) -> tuple[int, ...]:
    """A parameter's own shape, also while it is shown as a shard."""
    index = flat.index_of.get(id(parameter))
    return tuple(parameter.shape) if index is None else flat.layout.slots[index].spec.shape


def _require_states_in_state(optimizer: Optimizer, flat: FlatParameters) -> None:
    """Refuses a tensor for each parameter that an optimizer made when it was built, where it cannot be cut.

    Raises:
        UserError: It keeps some elsewhere than in its `state`.
    """
    if (listed := _listed(optimizer, flat)) is None:
        return
    name, tensors = listed
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    updated = [flat.local.get(flat.index_of.get(id(p), -1)) for p in parameters]
    pairs = zip(tensors, updated, strict=True)
    if flat.is_sharded or any(each.dtype != local.dtype for each, local in pairs if local is not None):
        raise UserError(
            f"{type(optimizer).__name__}.{name} has a tensor for each parameter, whole and in the dtype that is "
            "computed with, but inside step() a parameter is this rank's shard, in the dtype of its update: keep "
            "them in self.state[parameter], make them in the first step(), or set strategy.zero to 2 or less and "
            "strategy.precision to float32"
        )


def _cut_states(optimizer: str, states: dict[str, Any], flat: FlatParameters, index: int) -> None:
    """Makes what an optimizer holds for one parameter go with this rank's shard of it, in the dtype of its update."""
    local = flat.local[index]
    shape, dtype = local.shape, local.dtype
    for name, state in states.items():
        if type(state) is StateShard:
            state.__class__ = Tensor  # type: ignore[assignment]
            if state.shape == shape and state.dtype == dtype:
                # As nearly all are, from the second step on.
                continue
        if not isinstance(state, Tensor) or (not state.dim() and name in OF_ALL):
            continue
        spec = flat.layout.slots[index].spec
        if tuple(state.shape) == spec.shape:
            if state.shape != shape or state.dtype != dtype:
                states[name] = flat.cut(index, state)
        elif flat.shards > 1 and state.shape != local.shape and state.dim():
            raise UserError(
                f"{optimizer} holds {name} of shape {list(state.shape)} for {spec.name}, of which "
                f"this rank updates {local.numel()} elements: load states that were saved with the same strategy "
                "and number of ranks, or those of one process"
            )
