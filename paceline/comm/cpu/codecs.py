"""Gradients in fewer bytes, for the wire between hosts."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from paceline.comm.cpu.sums import Kernel

Wire = Literal["full", "bfloat16", "int8"]

BLOCK = 256
"""Elements that share a scale in int8."""


class Codec(Protocol):
    """Turns fp32 elements into bytes and back."""

    def size(self, numel: int) -> int:
        """Bytes of so many elements."""
        ...

    def residual(self, numel: int) -> Tensor | None:
        """Where `encode_kernel` keeps what rounding takes off so many elements; None if it keeps nothing."""
        ...

    def encode_kernel(self, source: Tensor, data: Tensor, sent: Tensor | None, residual: Tensor | None) -> Kernel:
        """A function that puts `source` into bytes.

        Args:
            source: fp32, one dimension; is not changed, unless it is `sent`.
            data: uint8, of `size(source.numel())` elements.
            sent: Gets what the receivers will see; None where nobody asks.
            residual: From `residual(source.numel())`; goes with the source from one call to the next.
        """
        ...

    def decode_kernel(self, data: Tensor, target: Tensor) -> Kernel:
        """A function that puts bytes back into elements.

        Args:
            data: uint8, of `size(target.numel())` elements.
            target: fp32, one dimension.
        """
        ...


class Bfloat16:
    """Rounded to bf16: half the bytes."""

    def size(self, numel: int) -> int:
        """Two bytes an element."""
        return 2 * numel

    def residual(self, numel: int) -> Tensor | None:
        """None: what rounding takes off is lost."""
        return None

    def encode_kernel(self, source: Tensor, data: Tensor, sent: Tensor | None, residual: Tensor | None) -> Kernel:
        """See `Codec`."""
        low = data.view(torch.bfloat16)

        def encode() -> None:
            low.copy_(source)
            if sent is not None:
                sent.copy_(low)

        return encode

    def decode_kernel(self, data: Tensor, target: Tensor) -> Kernel:
        """See `Codec`."""
        low = data.view(torch.bfloat16)

        def decode() -> None:
            target.copy_(low)

        return decode


class Int8:
    """Blocks of 8-bit integers, each with an fp32 scale; what rounding takes off is added to what is sent next.

    The error feedback of Seide et al. 2014: without it, what is too small to be seen beside its block's largest element
    would never arrive. It takes 4 bytes an element of what a rank sends.
    """

    def size(self, numel: int) -> int:
        """A byte an element, and four for every block."""
        return numel + 4 * _blocks(numel)

    def residual(self, numel: int) -> Tensor | None:
        """Zeros, fp32, in whole blocks, the last filled up."""
        return torch.zeros(_blocks(numel) * BLOCK)

    def encode_kernel(self, source: Tensor, data: Tensor, sent: Tensor | None, residual: Tensor | None) -> Kernel:
        """See `Codec`."""
        assert residual is not None
        numel, blocks = source.numel(), _blocks(source.numel())
        scales, integers = data[: 4 * blocks].view(torch.float32), data[4 * blocks :].view(torch.int8)
        grid = residual.view(blocks, BLOCK)
        wanted = torch.empty_like(grid)

        def encode() -> None:
            residual[:numel].add_(source)
            torch.div(torch.amax(grid.abs(), 1), 127, out=scales)
            # A block of zeros has no scale, and needs none.
            torch.div(grid, scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None], out=wanted)
            # Zero is added as whole numbers that are sent have no negative one.
            wanted.round_().add_(0.0)
            integers.copy_(wanted.view(-1)[:numel])
            wanted.mul_(scales[:, None])
            if sent is not None:
                sent.copy_(wanted.view(-1)[:numel])
            residual.sub_(wanted.view(-1))
            # A step with a NaN or infinity is skipped by all ranks; the next one starts clean.
            residual.nan_to_num_(0.0, 0.0, 0.0)

        return encode

    def decode_kernel(self, data: Tensor, target: Tensor) -> Kernel:
        """See `Codec`."""
        numel, blocks = target.numel(), _blocks(target.numel())
        scales, integers = data[: 4 * blocks].view(torch.float32), data[4 * blocks :].view(torch.int8)
        whole = numel - numel % BLOCK

        def decode() -> None:
            target.copy_(integers)
            if whole:
                target[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
            if whole < numel:
                target[whole:].mul_(scales[-1])

        return decode


CODECS: dict[str, Codec] = {"bfloat16": Bfloat16(), "int8": Int8()}
"""By the name that `Strategy.wire` gives them."""


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)
