"""Gradients in fewer bytes, for the wire between hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

Work = Callable[[], None]
Wire = Literal["full", "bfloat16", "int8"]

BLOCK = 256
"""Elements that share a scale in int8."""


class Codec(Protocol):
    """Turns fp32 elements into bytes and back."""

    def size(self, numel: int) -> int:
        """Bytes of so many elements."""
        ...

    def encoding(self, source: Tensor, data: Tensor, sent: Tensor | None) -> Work:
        """A function that puts `source` into bytes.

        Args:
            source: fp32, one dimension; is not changed, unless it is `sent`.
            data: uint8, of `size(source.numel())` elements.
            sent: Gets what the receivers will see; None where nobody asks.
        """
        ...

    def decoding(self, data: Tensor, target: Tensor) -> Work:
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

    def encoding(self, source: Tensor, data: Tensor, sent: Tensor | None) -> Work:
        """See `Codec`."""
        low = data.view(torch.bfloat16)

        def encode() -> None:
            low.copy_(source)
            if sent is not None:
                sent.copy_(low)

        return encode

    def decoding(self, data: Tensor, target: Tensor) -> Work:
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

    def encoding(self, source: Tensor, data: Tensor, sent: Tensor | None) -> Work:
        """See `Codec`."""
        numel, blocks = source.numel(), _blocks(source.numel())
        scales, integers = data[: 4 * blocks].view(torch.float32), data[4 * blocks :].view(torch.int8)
        # In whole blocks, the last filled up with zeros. Between calls: what is still owed.
        owed = torch.zeros(blocks * BLOCK)
        grid = owed.view(blocks, BLOCK)
        wanted = torch.empty_like(grid)

        def encode() -> None:
            owed[:numel].add_(source)
            torch.div(torch.amax(grid.abs(), 1), 127, out=scales)
            # A block of zeros has no scale, and needs none.
            torch.div(grid, scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None], out=wanted)
            # Zero is added as whole numbers that are sent have no negative one.
            wanted.round_().add_(0.0)
            integers.copy_(wanted.view(-1)[:numel])
            wanted.mul_(scales[:, None])
            if sent is not None:
                sent.copy_(wanted.view(-1)[:numel])
            owed.sub_(wanted.view(-1))
            # A step with a NaN or infinity is skipped by all ranks; the next one starts clean.
            owed.nan_to_num_(0.0, 0.0, 0.0)

        return encode

    def decoding(self, data: Tensor, target: Tensor) -> Work:
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
