"""The 2-norm of a reduced gradient of which this rank has a shard: known since its backward, until it is edited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NORMS = frozenset({"norm", "linalg_vector_norm", "_foreach_norm", "linalg_norm", "linalg_matrix_norm"})
"""Functions, by their names."""

_SPECTRAL = frozenset({"linalg_norm", "linalg_matrix_norm"})
"""Those whose order 2 is the largest singular value of a matrix."""

_NO_EDITS = frozenset({"requires_grad_", "detach_"})
_NO_ARITHMETIC = frozenset({"__index__", "__int__", "__invert__", "__iter__"})


@dataclass(slots=True)
class ReducedNorm:
    """What a backward has told of one gradient: shared by all tensors that are its shard's memory.

    No rank need be asked for the norm afterwards. Functions that edit a shard make it unknown, on ranks that have no
    element of it, too. Where a shard was edited past them its own norm is another one.

    Attributes:
        own: The norm of this rank's shard, fp64, 0-dim.
        whole: That of the whole gradient, fp64, 0-dim.
        edited: Whether the shard is what it was no more.
    """

    own: Tensor
    whole: Tensor
    edited: bool = False

    def of(self, shard: Tensor) -> Tensor | None:
        """Returns the whole gradient's norm in the dtype of its shard, 0-dim; None where that was edited.

        On a GPU its host waits.

        Args:
            shard: This rank's, of the gradient as it is now.
        """
        if self.edited:
            return None
        now = norms_of([shard], shard.device)[0]
        self.edited = not (now == self.own or (now.isnan() and self.own.isnan()))
        return None if self.edited else self.whole.to(shard.dtype.to_real(), copy=True)

    def scale(self, shard: Tensor, factor: Tensor) -> None:
        """The whole gradient has been multiplied.

        Args:
            shard: This rank's, multiplied.
            factor: By what: one element, positive.
        """
        self.own, self.whole = norms_of([shard], shard.device)[0], self.whole * factor.to(self.whole)


def norms_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """2-norms of tensors, summed in fp32 where they are of lower precision: (number of tensors,), fp64.

    Args:
        tensors: All on `device`; there may be none. Shards of gradients are taken for what they hold.
        device: Where the norms are.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=device)
    found: dict[int, Tensor] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
            wide = torch.promote_types(dtype, torch.float32)  # of complex numbers their absolute values
            found.update(zip(chosen, torch._foreach_norm([tensors[index] for index in chosen], 2, wide), strict=True))
        norms = torch.stack([found[index] for index in range(len(tensors))]).double()
        if device.type == "cpu" and not norms.isfinite().all():
            # Squares of scaled gradients that are all finite may add up to more than fp32 has.
            for index in norms.isfinite().logical_not().nonzero().flatten().tolist():
                norms[index] = torch.linalg.vector_norm(tensors[index].abs().double())
        return norms


def norm_of(gradient: Tensor) -> Tensor | None:
    """The 2-norm of the whole gradient that a tensor is a shard of, if it is known: 0-dim, in the shard's dtype."""
    norm: ReducedNorm | None = gradient.__dict__.get("_norm")
    return norm.of(gradient) if norm is not None else None


def forget_norms(gradients: Iterable[Tensor]) -> None:
    """Shards have been edited, or are about to be: what is known of whole gradients' norms holds no more."""
    for each in gradients:
        if (norm := each.__dict__.get("_norm")) is not None:
            norm.edited = True


@contextmanager
def scaling(gradients: Iterable[Tensor], factor: Tensor) -> Iterator[None]:
    """Inside, gradients are multiplied, as every rank does; what is known of norms is so, too.

    Args:
        gradients: What is multiplied.
        factor: By what: one element, positive.
    """
    known = [each for each in gradients if norm_of(each) is not None]
    yield
    for each in known:
        each.__dict__["_norm"].scale(each, factor)


def may_edit(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function may write to a tensor that it is given, or gives memory that nobody sees written to."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_EDITS
    arithmetic = name.startswith("__i") and name not in _NO_ARITHMETIC
    hands_out = name in ("__set__", "untyped_storage") or func is Tensor.as_subclass
    return in_place or arithmetic or hands_out or "out" in kwargs


def known_norms(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], shards: type[Tensor]) -> Any:
    """What a function gives that asks for nothing but 2-norms of whole gradients; None if one is not known.

    Args:
        name: The function's.
        args: What it is called with.
        kwargs: By name.
        shards: The class of gradients that this rank has shards of; others are whole.
    """
    # As torch hands them on, also those that nobody has given.
    given = {key: value for key, value in kwargs.items() if value is not None and value is not False}
    orders = (*args[1:], *given.values())
    if name not in NORMS or len(orders) > 1 or not given.keys() <= {"ord", "p"} or not args:
        return None
    euclidean = ("fro",) if name in _SPECTRAL else (2, "fro")
    if orders and not (orders[0] is None or (isinstance(orders[0], (int, float, str)) and orders[0] in euclidean)):
        return None
    tensors = args[0] if name == "_foreach_norm" else [args[0]]
    norms = [norm_of(each) if isinstance(each, shards) else torch.linalg.vector_norm(each) for each in tensors]
    if any(norm is None for norm in norms):
        return None
    return norms if name == "_foreach_norm" else norms[0]
