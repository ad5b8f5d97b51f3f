"""Sums in the order of the ranks, a cache's worth at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Kernel = Callable[[], None]
"""Does one thing to tensors that were given before."""

CHUNK = 1 << 16
"""Elements summed at a time, so that scaling, accumulating and copying find them in the core's own cache."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a sum of `dtype` is accumulated."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def sum_kernel(
    out: Tensor, parts: Sequence[Tensor], scratch: Tensor, scale: float, copies: Sequence[Tensor] = ()
) -> Kernel:
    """A function that sets `out`, and `copies`, to scale * (parts[0] + parts[1] + ...), in that order.

    The order of the additions is fixed for each element, so that the sum does not depend on how a buffer was cut.
    bf16 and fp16 accumulate in fp32. It is cut up once, here, as it runs many times.

    Args:
        out: One dimension; may be one of `parts`.
        parts: Two or more tensors of the shape of `out` and of one dtype.
        scratch: As many elements as `out` has, `CHUNK` at most, of the dtype to accumulate in (`accumulation_dtype`).
        scale: Factor applied to the sum.
        copies: Of the shape and dtype of `out`; get the sum too.
    """
    pieces = []
    for start in range(0, out.numel(), CHUNK):
        stop = min(start + CHUNK, out.numel())
        pieces.append(
            (
                out[start:stop],
                [part[start:stop] for part in parts],
                scratch[: stop - start],
                [copy[start:stop] for copy in copies],
            )
        )
    wide = scratch.dtype != out.dtype or parts[0].dtype != out.dtype

    def plainly() -> None:
        for target, (first, second, *rest), total, others in pieces:
            if rest:
                torch.add(first, second, out=total)
                for part in rest[:-1]:
                    total.add_(part)
                torch.add(total, rest[-1], out=target)
            else:
                torch.add(first, second, out=target)
            if scale != 1.0:
                target.mul_(scale)
            for other in others:
                other.copy_(target)

    def widely() -> None:
        for target, (first, *rest), total, others in pieces:
            total.copy_(first)
            for part in rest:
                total.add_(part)
            # Scaled before it is rounded: a mean may fit where the sum does not.
            target.copy_(total.mul_(scale) if scale != 1.0 else total)
            for other in others:
                other.copy_(target)

    return widely if wide else plainly
