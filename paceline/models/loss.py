"""Cross-entropy summed over target tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Target value that takes no part in the loss; torch's own convention."""


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p(target) over targets other than IGNORED.

    The gradient, softmax minus one-hot, is formed in the forward pass, where the softmax is at hand.
    So the backward pass is one multiplication, and one tensor of the logits' size and dtype is kept
    where `F.cross_entropy` on half-precision logits keeps three times that.

    Args:
        logits: (n, vocabulary), floating point.
        targets: (n,) int64, in [0, vocabulary) or IGNORED.

    Returns:
        Scalar, float32 (float64 for float64 logits), differentiable once with respect to logits.

    Raises:
        IndexError, RuntimeError: From torch, for a target outside [0, vocabulary) that is not IGNORED.
    """
    loss: Tensor = _SummedCrossEntropy.apply(logits, targets)
    return loss


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        accumulate = torch.promote_types(logits.dtype, torch.float32)
        counted = targets != IGNORED
        index = torch.where(counted, targets, 0).unsqueeze(1)
        probability = torch.softmax(logits, dim=1, dtype=accumulate)
        # log p = logit - logsumexp, and logsumexp from the likeliest token: log(probability[target])
        # would be -inf where the target's probability underflows.
        highest = logits.amax(dim=1).to(accumulate)
        logsumexp = highest - probability.amax(dim=1).log()
        loss = logsumexp - logits.gather(1, index).squeeze(1)
        if ctx.needs_input_grad[0]:
            probability.scatter_add_(1, index, probability.new_full((), -1.0).expand_as(index))
            ctx.save_for_backward(probability.to(logits.dtype), counted)
        return torch.where(counted, loss, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        difference, counted = ctx.saved_tensors
        return difference * (grad_loss * counted).to(difference.dtype).unsqueeze(1), None
