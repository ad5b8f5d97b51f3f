"""The output layer, and the loss computed inside it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Target value that takes no part in the loss; torch's own convention."""


class Head(nn.Linear):
    """Output layer without bias: logits, or with targets their summed cross-entropy.

    Logits are the largest tensor of a small model's step, and of a large model's with a large
    vocabulary. So with targets they never leave this layer: the buffer that holds them becomes,
    in place, the gradient with respect to them (softmax minus one-hot), which is what the backward
    pass needs. `F.cross_entropy` after a linear layer allocates that size four times over.

    Rows of logits begin at multiples of 16 bytes, with some columns more than the vocabulary where that asks for it:
    tensor cores multiply what lies otherwise several times slower, such as GPT-2's 50,257 columns in bfloat16.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, bias=False)

    def reset_parameters(self) -> None:
        """Leave the weight as it is: the model draws it, or ties it to the embedding."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Project x onto the vocabulary.

        Args:
            x: (..., width), floating point.
            targets: (...) int64, in [0, vocabulary) or -100.

        Returns:
            Without targets, logits (..., vocabulary). With targets, the sum of -log p(target) over
            those that are not -100: a scalar, float32 (float64 for float64 input), that can be
            differentiated once.

        Raises:
            RuntimeError: From torch, for a target outside [0, vocabulary) other than -100.
        """
        if targets is None:
            return super().forward(x)
        weight = self.weight
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        loss: Tensor = _SummedCrossEntropy.apply(x.flatten(0, -2), weight, targets.flatten())
        return loss


_ROOM = 2.0**10
"""Factor of logits' gradients in float16, all of which are below 1 and most so small that they would vanish."""


_ALIGNMENT = 16
"""Bytes."""


def _step(weight: Tensor) -> int:
    """By how many elements of a weight's dtype rows are aligned."""
    return _ALIGNMENT // weight.itemsize


class _SummedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of softmax(x weight^T), summed over the targets that count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        vocabulary = weight.shape[0]
        more = -vocabulary % _step(weight)
        logits = F.linear(x, F.pad(weight, (0, 0, 0, more)) if more else weight)
        # Half precision would lose the sum; for float32 this is the same tensor.
        work = logits.to(torch.promote_types(logits.dtype, torch.float32))
        counted = targets != IGNORED
        index = torch.where(counted, targets, 0).unsqueeze(1)
        # Columns beyond the vocabulary are no token's: their probability, and so their gradient, is 0.
        work[:, vocabulary:].fill_(-torch.inf)
        target_logit = work[:, :vocabulary].gather(1, index)
        highest = work.amax(1, keepdim=True)
        total = work.sub_(highest).exp_().sum(1, keepdim=True)
        loss = total.log() + highest - target_logit
        work.div_(total)[:, :vocabulary].scatter_add_(1, index, torch.full_like(target_logit, -1.0))
        if logits.dtype == torch.float16:
            work.mul_(_ROOM)
        ctx.save_for_backward(x, weight, work.to(logits.dtype), counted.unsqueeze(1))
        return torch.where(counted.unsqueeze(1), loss, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, grad_logits, counted = ctx.saved_tensors
        # Scaling the rows of x and of its gradient, not grad_logits, spares a pass over the vocabulary.
        # The scale stays in float32: rounded to half precision it would bend every gradient alike.
        scale = grad_loss * counted / (_ROOM if grad_logits.dtype == torch.float16 else 1.0)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = _product(grad_logits, weight).mul_(scale) if needs_x else None
        grad_weight = (grad_logits.t() @ (x * scale).to(x.dtype))[: weight.shape[0]] if needs_weight else None
        return grad_x, grad_weight, None


def _product(grad_logits: Tensor, weight: Tensor) -> Tensor:
    """grad_logits (rows, vocabulary and more) times weight (vocabulary, width), of which no copy with more is made."""
    vocabulary = weight.shape[0]
    aligned = vocabulary - vocabulary % _step(weight)
    if aligned == vocabulary:
        return grad_logits @ weight
    rest = grad_logits[:, aligned:vocabulary] @ weight[aligned:]
    return rest.addmm_(grad_logits[:, :aligned], weight[:aligned])
