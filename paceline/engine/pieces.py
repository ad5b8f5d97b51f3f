"""Refuses torch functions that would look at this rank's pieces of the gradients as if they were whole."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from paceline.errors import UserError

_MARK = "_paceline_piece"


def mark_piece(gradient: Tensor) -> None:
    """Marks a gradient as this rank's piece of one."""
    setattr(gradient, _MARK, True)


def guard_pieces() -> None:
    """Makes torch's gradient norm and gradient scaler raise for marked gradients; without them they are what they were.

    Whichever way a training loop imported `clip_grad_norm_` or the scaler's class, these look up in their module or
    class what is replaced here.
    """
    total_norm = getattr(clip_grad, "_get_total_norm", None)
    if total_norm is not None and not hasattr(total_norm, _MARK):
        clip_grad._get_total_norm = utils.get_total_norm = _guarded_norm(total_norm)
    unscale = getattr(torch.amp.GradScaler, "_unscale_grads_", None)
    if unscale is not None and not hasattr(unscale, _MARK):
        torch.amp.GradScaler._unscale_grads_ = _guarded_unscaling(unscale)  # type: ignore[method-assign]


def _guarded_norm(total_norm: Any) -> Any:
    @functools.wraps(total_norm)
    def guarded(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if any(map(_is_piece, gradients)):
            raise UserError(
                "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's pieces of the gradients, another "
                "one on each rank: call pl.clip_grad_norm_(model, max_norm)"
            )
        norm: Tensor = total_norm(gradients, *args, **kwargs)
        return norm

    setattr(guarded, _MARK, True)
    return guarded


def _guarded_unscaling(unscale: Any) -> Any:
    @functools.wraps(unscale)
    def guarded(scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if not getattr(scaler, "agrees", False) and any(_is_piece(p.grad) for p in parameters if p.grad is not None):
            raise UserError(
                "torch.amp.GradScaler would look for infinities in this rank's pieces of the gradients, and skip other "
                "steps than the rest: use pl.GradScaler, which is the same but decides for all ranks"
            )
        return unscale(scaler, optimizer, *args, **kwargs)

    setattr(guarded, _MARK, True)
    return guarded


def _is_piece(gradient: Tensor) -> bool:
    return getattr(gradient, _MARK, False)
