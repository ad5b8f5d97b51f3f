"""Gradients that a training loop keeps once it has dropped `p.grad`: they stay as they were."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from paceline.buffers.storage_uses import storage_of, uses_of

Memory = dict[str, tuple[Tensor, Tensor, int]]


class HandedOut:
    """Views of buffers that are written again and again, given to a loop that may keep them.

    Plain PyTorch makes new gradients in each step, so a loop that keeps `p.grad` over `zero_grad()` keeps its values.
    Here they lie in buffers that are reused. The views that a loop gets share a storage of their own over a buffer's
    memory, so they can be counted. If any of them is left when the buffer is about to be written, that storage moves
    elsewhere with its values on CPUs, and every view of it follows. A GPU's storage does not move: the loop is left the
    memory, and the buffer takes other.
    """

    def __init__(self) -> None:
        """Has given nothing out."""
        self._memory: Memory = {}

    def over(self, name: str, buffer: Tensor) -> Tensor:
        """Returns another tensor over a buffer, whose views a loop is given, or a tensor that a loop has is made of.

        Args:
            name: Of the buffer.
            buffer: Contiguous and one-dimensional, with elements.
        """
        found = self._memory.get(name)
        if found is None or found[0].data_ptr() != buffer.data_ptr() or found[0].numel() != buffer.numel():
            shown = _another_over(buffer)
            found = self._memory[name] = (shown, buffer, uses_of(shown))
        return found[0]

    def view(self, name: str, buffer: Tensor, part: Tensor) -> Tensor:
        """Returns a view of a buffer that a loop may keep.

        Args:
            name: Of the buffer.
            buffer: See `over`; or empty.
            part: A view of it.
        """
        if not buffer.numel():
            return part.data
        offset = int(part.storage_offset()) - int(buffer.storage_offset())
        # No view to autograd, which would not let a loop's `p.grad.detach_()` be.
        return self.over(name, buffer).as_strided(part.shape, part.stride(), offset).data

    def uses(self, name: str) -> int:
        """Returns the number of tensors made of a buffer's views, here or by a loop, that are left; 0 where unknown."""
        found = self._memory.get(name)
        return uses_of(found[0]) - found[2] if found is not None else 0

    @property
    def is_moved(self) -> bool:
        """Whether somebody moved what was given out, as `share_memory_` does, so that it is in no buffer any more."""
        return any(shown.data_ptr() != buffer.data_ptr() for shown, buffer, _ in self._memory.values())

    def storages(self) -> set[int]:
        """The `storage_of` views of buffers that are still over their memory."""
        return {storage_of(shown) for shown, _, _ in self._memory.values()}

    def release(self, name: str, known: Mapping[int, int]) -> bool:
        """A buffer is about to be written: what a loop still has of it moves elsewhere.

        Args:
            name: Of the buffer.
            known: How many tensors, by their `storage_of`, will be taken from where they are before it is written.

        Returns:
            Whether it has some that cannot move: the buffer is to take other memory before it is written.
        """
        found = self._memory.get(name)
        if found is None or uses_of(found[0]) <= found[2] + known.get(storage_of(found[0]), 0):
            return False
        del self._memory[name]
        if not _can_move(found[0]):
            return True
        found[0].untyped_storage().share_memory_()
        return False


def _can_move(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _another_over(buffer: Tensor) -> Tensor:
    """A tensor on another storage over the same memory, which it keeps alive."""
    if _can_move(buffer):
        # By way of numpy, as what DLPack gives is no memory that a storage moves away from.
        return torch.from_numpy(buffer.detach().view(torch.uint8).numpy()).view(buffer.dtype)
    return from_dlpack(torch._C._to_dlpack(buffer.detach()))
