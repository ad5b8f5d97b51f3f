"""A number that tells whether ranks compute with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor


def weights_hash(parameters: Sequence[Tensor]) -> int:
    """A hash of all elements: below 2**20, so that sums of its squares are exact in fp64. A GPU's host waits for it.

    Args:
        parameters: Of any shape and dtype, on one device.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        sums = torch.stack([_sum_of_bits(each) for each in parameters]).tolist()
    return crc32(repr(sums).encode()) % (1 << 20)


def _sum_of_bits(parameter: Tensor) -> Tensor:
    """The sum of a tensor's memory, eight bytes as one number: as fast as memory is read, which no checksum is."""
    row = parameter.shape[-1] * parameter.itemsize if parameter.dim() else 0
    if row and row % 8 == 0 and parameter.is_contiguous() and parameter.storage_offset() * parameter.itemsize % 8 == 0:
        # As nearly all are, of which there may be hundreds.
        return parameter.view(torch.int64).sum()
    memory = parameter.detach().contiguous().view(-1).view(torch.uint8)
    if memory.storage_offset() % 8:
        memory = memory.clone()
    words = memory.numel() // 8 * 8
    return memory[:words].view(torch.int64).sum() + memory[words:].sum()
