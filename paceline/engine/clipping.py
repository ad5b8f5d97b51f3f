"""Refuses torch's own gradient clipping where each rank would clip by the norm of its pieces alone."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from paceline.errors import UserError

_MARK = "_paceline_piece"


def mark_piece(gradient: Tensor) -> None:
    """Marks a gradient as this rank's piece of one."""
    setattr(gradient, _MARK, True)


def guard_clipping() -> None:
    """Makes `torch.nn.utils.clip_grad_norm_` raise for marked gradients; without them it is what it was.

    Whichever way a training loop imported it, it looks its norm up in its module, so that is what is replaced.
    """
    total_norm = getattr(clip_grad, "_get_total_norm", None)
    if total_norm is None or hasattr(total_norm, _MARK):
        return

    @functools.wraps(total_norm)
    def guarded(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if any(getattr(gradient, _MARK, False) for gradient in gradients):
            raise UserError(
                "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's pieces of the gradients, another "
                "one on each rank: call pl.clip_grad_norm_(model, max_norm)"
            )
        norm: Tensor = total_norm(gradients, *args, **kwargs)
        return norm

    setattr(guarded, _MARK, True)
    clip_grad._get_total_norm = guarded
