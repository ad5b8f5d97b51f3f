"""Optimizers that update each element by itself, and so step on shards, and those that are shown whole parameters."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from paceline.buffers.flat_parameters import FlatParameters
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy

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

SHARD = "paceline_shard"
"""Key of a parameter group: which shard the states are of, of how many, where that is one for all models of an
optimizer, and for each parameter `cuts` of its model: None before its first step, and where it is whole."""


def elementwise(optimizer: type[Optimizer]) -> type[Optimizer]:
    """Vouches that an optimizer class updates each element from that element's gradient and state alone.

    Usable as a decorator. Such optimizers alone update shards. Others are shown whole parameters on every rank up to
    zero 2, and are refused at zero 3.
    """
    ELEMENTWISE.add(optimizer)
    return optimizer


def needs_whole(optimizer: Optimizer, flat: FlatParameters) -> bool:
    """Whether an optimizer is shown whole parameters and gradients, on every rank, where ranks have shards of them.

    So is one that keeps whole tensors of its own. At zero 3 it is refused instead, as no rank is to hold these.
    """
    if flat.shards == 1 or flat.is_sharded:
        return False
    if type(optimizer) not in ELEMENTWISE or isinstance(optimizer, torch.optim.SparseAdam):
        return True
    # Lists that it makes once it steps are of shards, and on some rank these may be whole.
    return not (is_of_torch(optimizer) or has_begun(optimizer)) and _listed(optimizer, flat) is not None


def has_begun(optimizer: Optimizer) -> bool:
    """Whether it has stepped on shards."""
    return any(SHARD in group for group in optimizer.param_groups)


_told: set[type[Optimizer]] = set()


def tell_of_memory(optimizer: Optimizer) -> None:
    """Warns of what an optimizer that is shown whole parameters costs, once for each class."""
    kind = type(optimizer)
    if kind not in _told:
        _told.add(kind)
        why, instead = (
            ("has a whole tensor for each parameter outside of its state", "keep them in self.state[parameter]")
            if kind in ELEMENTWISE
            else ("updates rows", "torch's other optimizers update shards, also of a table with sparse=True")
            if issubclass(kind, torch.optim.SparseAdam)
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


def require_elementwise(optimizer: Optimizer, strategy: Strategy) -> None:
    """Refuses an optimizer that shards alone do not serve.

    Raises:
        UserError: It is none of those that update each element by itself.
    """
    if type(optimizer) not in ELEMENTWISE:
        raise UserError(
            f"{type(optimizer).__name__} may need whole parameters or norms across them, but with zero={strategy.zero} "
            "each rank holds its own shards alone: set strategy.zero to 2 or less, where every rank updates all then, "
            "or use one of torch's elementwise optimizers (AdamW, SGD, ...); vouch for one of your own with "
            "pl.elementwise(YourOptimizer)"
        )


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether torch has the class, as it is."""
    return type(optimizer).__module__.startswith("torch.optim.")


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


def require_states_in_state(optimizer: Optimizer, flat: FlatParameters) -> None:
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
